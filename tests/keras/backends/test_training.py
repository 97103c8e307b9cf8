"""A small model on real text: mixed float16 with ours against float32 and bare."""

import re

import keras
import numpy as np
import pytest

import gradscale.core.policies
from gradscale.keras import LossScaleOptimizer
from tests.keras.backends.steps import BACKEND

SYMBOLS = " abcdefghijklmnopqrstuvwxyz"
CONTEXT = 6
STEPS = 150
# Makes the gradients too small for float16, as a deep model does; SGD takes the
# inverse into its step size.
SMALL = 2.0**-18


def data():
    """Return windows of characters and the next ones, from a file of this package."""
    text = gradscale.core.policies.__loader__.get_source("gradscale.core.policies")
    letters = re.sub("[^a-z]+", " ", text.lower())
    codes = np.array([SYMBOLS.index(letter) for letter in letters])
    windows = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)
    picked = np.random.RandomState(0).choice(len(windows), 16 * STEPS)
    chosen = windows[picked]
    onehot = np.eye(len(SYMBOLS), dtype="float32")[chosen[:, :CONTEXT]]
    return onehot.reshape(len(chosen), -1), chosen[:, CONTEXT]


def small_loss(labels, outputs):
    loss = keras.losses.sparse_categorical_crossentropy(
        labels, keras.ops.cast(outputs, "float32"), from_logits=True
    )
    return keras.ops.mean(loss) * SMALL


def trained(policy, wrap, seed):
    """Return the mean loss of the last third of a run."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((CONTEXT * len(SYMBOLS),)),
            keras.layers.Dense(16, activation="gelu"),
            keras.layers.Dense(16, activation="gelu"),
            keras.layers.Dense(len(SYMBOLS)),
        ]
    )
    model.compile(
        wrap(keras.optimizers.SGD(0.5 / SMALL)), small_loss, auto_scale_loss=False
    )
    losses = []

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"] * (batch + 1))

    x, y = data()
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[Keep()])
    each = np.diff([0.0, *losses]) / SMALL
    return float(np.mean(each[-STEPS // 3 :])), model.optimizer


@pytest.fixture(scope="module")
def runs():
    found = {}
    for seed in (1, 2, 3):
        found["float32", seed], _ = trained("float32", lambda inner: inner, seed)
    found["ours"], optimizer = trained("mixed_float16", LossScaleOptimizer, 1)
    found["bare"], _ = trained("mixed_float16", lambda inner: inner, 1)
    assert optimizer.applied_steps > 0.9 * STEPS
    return found


def test_mixed_float16_trains_as_float32(runs):
    seeds = [runs["float32", seed] for seed in (1, 2, 3)]
    noise = max(seeds) - min(seeds)
    print(f"{BACKEND}: {runs}")
    assert abs(runs["ours"] - runs["float32", 1]) <= noise


def test_bare_float16_is_worse(runs):
    assert runs["bare"] > runs["float32", 1] + 0.3
