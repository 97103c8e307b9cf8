"""`fit` and the callback: logs, run file, verdicts, mixed precision."""

import functools
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from keras import ops

from gradscale import DynamicScale, StaticScale
from gradscale.errors import ConfigError, HopelessRun
from gradscale.keras import LossScaleOptimizer, Monitor, compile, loss_scaled
from gradscale.runfile import open_run
from tests.keras.backends.steps import BACKEND, made, stepped, values

X = np.random.RandomState(0).randn(32, 4).astype("float32")
Y = X[:, :2]
NAN = float("nan")
# A function of TensorFlow takes a second to trace; for tests about something else.
EAGERLY = BACKEND == "tensorflow"


def network():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(2, name="head")], name="net"
    )


def model_of(optimizer="sgd", **settings):
    model = network()
    compile(model, optimizer, loss="mse", **settings)
    return model


@functools.cache
def compiled_once():
    """Return a model and the values of its variables before the first step."""
    model = model_of(keras.optimizers.SGD(0.01))
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    return model, [(v, ops.convert_to_numpy(v.value).copy()) for v in variables]


@pytest.fixture
def model():
    """Return a new model; one for all tests, since it takes a second to compile."""
    model, first = compiled_once()
    for variable, value in first:
        variable.assign(value)
    return model


def fitted(model, x=X, callbacks=(), **settings):
    return model.fit(
        x,
        x[:, :2],
        batch_size=8,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **settings,
    )


def with_nan(*rows):
    x = X.copy()
    x[list(rows)] = NAN
    return x


# --- the way in -----------------------------------------------------------------------


def test_compile_under_mixed_float16_does_not_wrap_a_second_time():
    keras.config.set_dtype_policy("mixed_float16")
    model = model_of("adam")
    assert type(model.optimizer) is LossScaleOptimizer
    assert type(model.optimizer.inner_optimizer).__name__ == "Adam"
    fitted(model)
    assert model.optimizer.applied_steps + model.optimizer.skipped_steps == 4


def test_model_compile_takes_our_class_as_it_is():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse")
    assert model.optimizer is optimizer


def test_a_static_loss_scale_factor_is_honoured():
    keras.config.set_dtype_policy("mixed_float16")
    inner = keras.optimizers.SGD(0.01, loss_scale_factor=64.0)
    model = model_of(inner, run_eagerly=EAGERLY)
    assert model.optimizer.policy == StaticScale(scale=64.0)
    fitted(model)
    assert model.optimizer.scale == 64.0
    assert model.optimizer.last.scale == 64.0


def test_two_policies_for_one_optimizer_are_an_error():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert loss_scaled(optimizer) is optimizer
    with pytest.raises(ConfigError, match="has the policy"):
        loss_scaled(optimizer, StaticScale(scale=2.0))
    factor = keras.optimizers.SGD(0.1, loss_scale_factor=64.0)
    with pytest.raises(ConfigError, match=r"StaticScale\(scale=64\.0\) already"):
        loss_scaled(factor, DynamicScale())


def test_no_optimizer_is_an_error():
    with pytest.raises(ConfigError, match="optimizer=None"):
        compile(network(), None, loss="mse")


def test_train_on_batch_counts_its_steps(model):
    model.train_on_batch(X[:8], Y[:8])
    model.train_on_batch(with_nan(0)[:8], Y[:8])
    optimizer = model.optimizer
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (1, 1)
    assert optimizer.last.culprits == ("net/head/kernel", "net/head/bias")


def test_a_compiled_fit_skips_and_names_culprits():
    model = model_of(jit_compile=BACKEND != "torch")
    fitted(model, with_nan(31))
    assert model.optimizer.last.culprits == ("net/head/kernel", "net/head/bias")
    assert all(np.isfinite(w).all() for w in model.get_weights())


# --- the callback ---------------------------------------------------------------------


def test_scale_and_skips_are_in_the_logs(model):
    history = fitted(model, with_nan(9), [Monitor(quiet=True)], epochs=2).history
    assert history["skipped"] == [1, 2]
    assert history["scale"] == [2.0**14, 2.0**13]
    assert np.isnan(history["loss"]).all()


def test_the_progress_bar_shows_them(model, capsys):
    model.fit(X, Y, batch_size=8, verbose=2, callbacks=[Monitor(quiet=True)])
    assert "scale: 32768.0000 - skipped: 0" in capsys.readouterr().out


def test_the_run_file_has_a_row_for_each_step(model, tmp_path):
    monitor = Monitor(record=tmp_path / "run.gs", quiet=True, meta={"run": "test"})
    fitted(model, with_nan(9), [monitor])
    assert monitor.path == tmp_path / "run.gs"
    with open_run(tmp_path / "run.gs") as run:
        rows = list(run.steps())
        events = [(event.code, event.step, event.where) for event in run.events()]
        meta = run.meta
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert [row.applied for row in rows] == [True, False, True, True]
    assert [row.verdict for row in rows] == ["GS000", "GS203", "GS000", "GS000"]
    assert ("GS203", 2, "net/head/kernel") in events
    assert meta["parameters"] == ["net/head/kernel", "net/head/bias"]
    assert meta["policy"]["kind"] == "DynamicScale"
    assert (meta["backend"], meta["run"]) == (BACKEND, "test")


def step_losses(model, x):
    """Return the loss of every step of an epoch, computed by NumPy."""
    weight, bias = model.get_weights()
    losses = []
    for start in range(0, len(x), 8):
        batch = x[start : start + 8]
        error = batch @ weight + bias - batch[:, :2]
        losses.append(float(np.mean(error**2)))
        weight = weight - 0.01 * batch.T @ error / len(batch)
        bias = bias - 0.01 * error.mean(0)
    return losses


def test_the_loss_of_a_step_is_in_its_row(model, tmp_path):
    # Keras' mean counts the four rows of the last batch half.
    x = np.concatenate([X, 100.0 + X[:4]])
    expected = step_losses(model, x)
    fitted(model, x, [Monitor(record=tmp_path / "run.gs", quiet=True)])
    with open_run(tmp_path / "run.gs") as run:
        found = [row.loss for row in run.steps()]
    # From a sum in float32.
    assert np.allclose(found, expected, rtol=1e-5)


def test_a_train_step_that_returns_the_loss_of_the_step_is_recorded(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(2)

        def call(self, x):
            return self.head(x)

        def train_step(self, *given):
            out = super().train_step(*given)
            logs = {"loss": ops.convert_to_tensor(3.0)}
            return (logs, *out[1:]) if BACKEND == "jax" else logs

    own = Own()
    compile(own, "sgd", loss="mse", run_eagerly=EAGERLY)
    own._loss_tracker.update_state = lambda *given, **more: None
    fitted(own, X, [Monitor(record=tmp_path / "run.gs", quiet=True)])
    with open_run(tmp_path / "run.gs") as run:
        assert [row.loss for row in run.steps()] == [3.0] * 4


def test_losses_after_one_that_is_not_finite_are_known(model, tmp_path):
    fitted(model, with_nan(9), [Monitor(record=tmp_path / "run.gs", quiet=True)])
    with open_run(tmp_path / "run.gs") as run:
        finite = [row.loss is not None and np.isfinite(row.loss) for row in run.steps()]
    assert finite == [True, False, True, True]


def test_a_loss_that_stays_nan_has_the_same_verdict_on_every_step(model, tmp_path):
    x = np.full_like(X, NAN)
    fitted(model, x, [Monitor(record=tmp_path / "run.gs", quiet=True)])
    with open_run(tmp_path / "run.gs") as run:
        assert {row.verdict for row in run.steps()} == {"GS203"}


def test_a_quiet_monitor_prints_nothing(model, tmp_path, capsys):
    fitted(model, with_nan(9), [Monitor(record=tmp_path / "run.gs", quiet=True)])
    assert "".join(capsys.readouterr()) == ""


def test_a_second_fit_continues_the_file(model, tmp_path):
    monitor = Monitor(record=tmp_path / "run.gs", quiet=True)
    fitted(model, X, [monitor])
    fitted(model, X, [monitor])
    with open_run(tmp_path / "run.gs") as run:
        assert [row.step for row in run.steps()] == list(range(1, 9))


@pytest.mark.skipif(BACKEND != "jax", reason="the file is the same on all backends")
@pytest.mark.parametrize("command", ["report", "doctor", "tail"])
def test_a_command_reads_the_file(model, tmp_path, command):
    fitted(model, with_nan(9), [Monitor(record=tmp_path / "run.gs", quiet=True)])
    done = subprocess.run(
        [sys.executable, "-m", "gradscale", command, str(tmp_path / "run.gs")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 1), done.stderr
    assert ("step 4" if command == "tail" else "4 steps") in done.stdout


def test_guard_raise_ends_a_hopeless_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = DynamicScale(init_scale=2.0, min_scale=1.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=policy)
    model = model_of(optimizer, run_eagerly=EAGERLY)
    with pytest.raises(HopelessRun):
        fitted(
            model,
            np.full_like(X, NAN),
            [Monitor(quiet=True, guard="raise")],
            epochs=100,
        )


def test_another_optimizer_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", loss="mse")
    with pytest.raises(ConfigError, match="The optimizer is a SGD"):
        fitted(model, X, [Monitor()])


def test_a_loop_of_ones_own_is_recorded_with_its_loss(tmp_path):
    optimizer, variables = made()
    with Monitor(record=tmp_path / "run.gs", quiet=True) as monitor:
        for loss, grad in ((0.5, 1.0), (NAN, NAN), (0.25, 1.0)):
            stepped(optimizer, variables, [grad, 1.0])
            monitor.step(optimizer, ops.convert_to_tensor(loss))
    with open_run(tmp_path / "run.gs") as run:
        rows = list(run.steps())
    assert [row.verdict for row in rows] == ["GS000", "GS203", "GS000"]
    assert [rows[0].loss, rows[2].loss] == [0.5, 0.25]


KILLED = """
import sys, time
import keras, numpy as np
from gradscale.keras import Monitor, compile

class Clock(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        # The row of this step was handed over before.
        print(int(self.model.optimizer_steps()), flush=True)
        time.sleep(0.02)

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
compile(model, "sgd", loss="mse")
monitor = Monitor(record=sys.argv[1], quiet=True)
model.optimizer_steps = lambda: monitor._step
x = np.random.randn(8000, 4).astype("float32")
model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[monitor, Clock()])
"""


@pytest.mark.skipif(BACKEND != "jax", reason="the writer is the same on all backends")
def test_a_killed_run_loses_less_than_a_second(tmp_path):
    path = tmp_path / "run.gs"
    times = {}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KERAS_BACKEND": BACKEND},
    )
    try:
        for line in process.stdout:
            times[int(line)] = time.monotonic()
            if len(times) == 120:
                break
        killed = time.monotonic()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with open_run(path) as run:
        last = max(row.step for row in run.steps())
    after = [when for step, when in times.items() if step > last]
    assert not after or killed - min(after) < 1.0


# --- host reads -----------------------------------------------------------------------


@pytest.mark.skipif(BACKEND != "torch", reason="counted by torch's dispatcher")
def test_a_step_reads_no_more_from_the_device_than_keras_own():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    counts = {}
    for kind in (LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
        weight = keras.Variable([1.0, 2.0])
        optimizer = kind(keras.optimizers.Adam(0.1))
        optimizer.build([weight])
        grad = ops.convert_to_tensor([1.0, 2.0])
        optimizer.apply([grad], [weight])
        with Reads() as reads:
            optimizer.apply([grad], [weight])
        counts[kind] = reads.count
    assert 0 < counts[LossScaleOptimizer] <= counts[keras.optimizers.LossScaleOptimizer]


@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile")
def test_a_step_compiled_by_torch_is_skipped():
    import torch

    optimizer, variables = made(initial_scale=8.0)

    @torch.compile(backend="eager")
    def step(grad):
        with torch.no_grad():
            optimizer.apply([grad], variables)

    for bad in (8.0, NAN, 8.0):
        step(torch.tensor([8.0, bad]))
    assert values(variables) == [[-0.5, 0.5]]
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (2, 1)


# --- JAX ------------------------------------------------------------------------------


def data_parallel(devices):
    return keras.distribution.DataParallel(devices=devices)


def model_parallel(devices):
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["net/head/kernel"] = (None, "model")
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


@pytest.mark.skipif(BACKEND != "jax", reason="the distribution API is JAX's")
@pytest.mark.parametrize("distribution", [data_parallel, model_parallel])
def test_distributed_training_skips_and_equals_one_device(model, distribution):
    import jax

    assert jax.device_count() == 2
    weights = model.get_weights()
    fitted(model, with_nan(9))
    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(distribution(devices))
    try:
        other = model_of(keras.optimizers.SGD(0.01))
        other.set_weights(weights)
        fitted(other, with_nan(9), [Monitor(quiet=True)])
        kernel = other.trainable_variables[0].value
        assert len(kernel.sharding.device_set) == 2
        optimizer = other.optimizer
        assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)
        assert np.allclose(values(other.weights)[0], values(model.weights)[0])
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has it not on torch")
def test_several_steps_an_execution_are_counted_exactly(tmp_path):
    model = model_of(steps_per_execution=2)
    monitor = Monitor(record=tmp_path / "run.gs", quiet=True)
    fitted(model, with_nan(1), [monitor])
    optimizer = model.optimizer
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)
    with open_run(tmp_path / "run.gs") as run:
        assert [row.step for row in run.steps()] == [2, 4]


def test_a_resumed_run_goes_on_in_its_file(tmp_path, model):
    path, saved = tmp_path / "run.gs", tmp_path / "model.keras"
    fitted(model, callbacks=[Monitor(record=path)])
    model.save(saved)
    # As in a new process.
    again = keras.saving.load_model(saved)
    assert again.optimizer.applied_steps == 4
    fitted(again, callbacks=[Monitor(record=path, resume=True)])
    with open_run(path) as run:
        assert [row.step for row in run.steps()] == list(range(1, 9))
        assert {row.verdict for row in run.steps()} == {"GS000"}
