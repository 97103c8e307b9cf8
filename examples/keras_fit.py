"""Train a Keras model in mixed precision with `fit`, and record the run.

A small network fits a polynomial on any backend. One batch is corrupt on purpose: its
loss is NaN and the step is skipped. The progress bar shows the scale and the skips.

  KERAS_BACKEND=jax python examples/keras_fit.py            writes run.gs
  KERAS_BACKEND=torch python examples/keras_fit.py -o other.gs
  python examples/keras_fit.py --json                       the figures for a program
"""

import argparse
import json
from typing import Any

import keras
import numpy as np

from gradscale.keras import Monitor, compile

BATCH, BATCHES = 64, 40


def train(path: str, epochs: int, seed: int, verbose: int) -> dict[str, Any]:
    """Train, write the run file, and return the figures of the run."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(64, activation="tanh", name="hidden"),
            keras.layers.Dense(1, name="head", dtype="float32"),
        ]
    )
    compile(model, keras.optimizers.Adam(2e-2, global_clipnorm=1.0), loss="mse")
    x = np.random.default_rng(seed).uniform(-2.0, 2.0, (BATCH * BATCHES, 1))
    x = x.astype("float32")
    y = x**3 - 2.0 * x
    x[BATCH * BATCHES // 2] = np.nan
    monitor = Monitor(record=path)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=verbose,
        callbacks=[monitor],
    )
    good = np.isfinite(x[:, 0])
    error = model.evaluate(x[good], y[good], verbose=0)
    return {
        "loss": error,
        "applied": model.optimizer.applied_steps,
        "skipped": model.optimizer.skipped_steps,
        "scale": history.history["scale"][-1],
        "backend": keras.backend.backend(),
        "file": str(monitor.path),
    }


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", default="run.gs")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    verbose = 0 if options.json else 2
    figures = train(options.out, options.epochs, options.seed, verbose)
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"{figures['backend']}: loss {figures['loss']:.3f}, "
        f"{figures['applied']} steps applied, {figures['skipped']} skipped"
    )
    print(f"Read the record with: gradscale report {figures['file']}")


if __name__ == "__main__":
    main()
