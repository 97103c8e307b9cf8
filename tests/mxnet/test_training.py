"""Nets in float32, float16 and bfloat16 train; an overflow costs one step."""

import json
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet.contrib.amp.amp import bfloat16

from gradscale.mxnet import FP16Trainer, amp
from gradscale.runfile import open_run
from tests.mxnet.bfloat16_run import DENSE_FAILS, DENSE_WORKS
from tests.mxnet.nets import CPU, INF, NAN, parameter, step, trainer_of, values

HERE = Path(__file__).parent
LOSS = mx.gluon.loss.L2Loss()


class Affine(mx.gluon.Block):
    """An element-wise net: float16 products of matrices need a GPU."""

    def __init__(self, dtype, start=0.0):
        super().__init__()
        with self.name_scope():
            init = mx.init.Constant(start)
            self.slope = self.params.get("slope", shape=(4,), dtype=dtype, init=init)
            self.shift = self.params.get("shift", shape=(4,), dtype=dtype, init=init)

    def forward(self, x):
        return x * self.slope.data(x.context) + self.shift.data(x.context)


class BFloat16Affine(Affine):
    """The same in bfloat16 with float32 weights."""

    def forward(self, x):
        # Of one shape: MXNet broadcasts no bfloat16.
        slope, shift = (
            mx.nd.broadcast_like(each.data(x.context).reshape((1, 4)), x)
            for each in (self.slope, self.shift)
        )
        x, slope, shift = (mx.nd.amp_cast(a, dtype=bfloat16) for a in (x, slope, shift))
        out = x * slope + shift
        assert out.dtype == bfloat16
        return mx.nd.amp_cast(out, dtype="float32")


def trained(net, batches, policy=None, batch_size=16, **optimizer):
    """Train a net on several devices; return its losses and its scaler."""
    settings = {"learning_rate": 0.5, "momentum": 0.9, **optimizer}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", settings)
    scaler = amp.init_loss_scaling(trainer, policy)
    losses = []
    for parts in batches:
        with mx.autograd.record():
            each = [LOSS(net(x), y) for x, y in parts]
            with amp.scale_loss(each, trainer) as scaled:
                mx.autograd.backward(scaled)
        trainer.step(batch_size)
        losses.append(scaler.last.record.loss)
    return losses, scaler


def affine_batches(dtype, steps=40, devices=CPU[:1]):
    """Return batches of y = 2 x - 1."""
    rng = np.random.RandomState(0)
    batches = []
    for _ in range(steps):
        x = mx.nd.array(rng.uniform(-1, 1, (16, 4)), dtype=dtype)
        parts = mx.gluon.utils.split_and_load(x, list(devices))
        batches.append([(part, 2 * part - 1) for part in parts])
    return batches


def test_a_float32_net_trains():
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(8, activation="relu"), mx.gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    losses, scaler = trained(net, affine_batches("float32"), learning_rate=0.1)
    assert losses[-1] < 0.1 * losses[0]
    assert (scaler.applied_steps, scaler.skipped_steps) == (40, 0)


def test_a_float32_run_has_the_weights_of_a_run_without_scaling():
    ends = []
    for scaling in (True, False):
        net = Affine("float32")
        net.initialize()
        settings = {"learning_rate": 0.5}
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", settings)
        if scaling:
            amp.init_trainer(trainer)
        for ((x, y),) in affine_batches("float32", steps=5):
            with mx.autograd.record():
                loss = LOSS(net(x), y)
                if scaling:
                    with amp.scale_loss(loss, trainer) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
            trainer.step(16)
        ends.append(net.slope.data().asnumpy().tolist())
    # Powers of two only: bit for bit.
    assert ends[0] == ends[1]


@pytest.mark.parametrize("devices", [1, 2])
def test_an_element_wise_float16_net_trains(devices):
    net = Affine("float16")
    net.initialize(ctx=list(CPU[:devices]))
    batches = affine_batches("float16", devices=CPU[:devices])
    losses, scaler = trained(net, batches, multi_precision=True)
    # An f16 loss cannot hold 2^16, so at least the first step is skipped.
    assert scaler.skipped_steps >= 1
    assert scaler.loss_scale == 2.0 ** (16 - scaler.skipped_steps)
    assert losses[-1] < 0.01 * losses[0]


def test_an_element_wise_bfloat16_net_trains():
    net = BFloat16Affine("float32")
    net.initialize()
    losses, scaler = trained(net, affine_batches("float32"), learning_rate=0.3)
    assert losses[-1] < 0.05 * losses[0]
    assert scaler.skipped_steps == 0


def test_gradients_that_float16_loses_arrive_with_a_scale():
    weight = parameter(values=(1.0, 1.0), dtype="float16")
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer, init_scale=2.0**14)
    seen = {}
    for name, factor in (("bare", 1.0), ("scaled", scaler.loss_scale)):
        with mx.autograd.record():
            loss = weight.data() * 1e-4 * 1e-4 * factor
        loss.backward()
        seen[name] = float(weight.grad().asnumpy()[0]) / factor
    assert seen["bare"] == 0.0
    assert seen["scaled"] == pytest.approx(1e-8, rel=0.01)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("device", [0, 1, 2])
def test_an_overflow_on_any_device_costs_one_step_and_one_halving(device, bad):
    weight = parameter(devices=3)
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer)
    factors = [1.0] * 3
    factors[device] = bad
    step("gradscale", trainer, factors)
    assert values(weight) == [[1.0, 2.0]] * 3
    assert scaler.last.culprits == (f"weight@cpu({device})",)
    step("gradscale", trainer, [2.0] * 3)
    assert (scaler.last.applied, scaler.last.scale) == (True, 2.0**15)
    assert values(weight) == [[0.0, 1.0]] * 3


@pytest.fixture
def numpy_interface():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


@pytest.mark.parametrize("by_fp16_trainer", [False, True])
def test_a_net_of_the_numpy_interface_trains_over_an_overflow(
    numpy_interface, by_fp16_trainer
):
    net = mx.gluon.nn.Dense(1)
    net.initialize(mx.init.One())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    scaler = (FP16Trainer if by_fp16_trainer else amp.init_loss_scaling)(trainer)
    outcomes, losses = [], []
    for factor in (1.0, INF, 1.0, 1.0):
        with mx.autograd.record():
            loss = (net(mx.np.ones((4, 3)) * factor) ** 2).mean()
            if not by_fp16_trainer:
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
        if by_fp16_trainer:
            scaler.backward(loss)
            scaler.step(1, max_norm=1.0)
        else:
            trainer.step(1)
        outcomes.append(scaler.last.applied)
        losses.append(float(loss))
    assert outcomes == [True, False, True, True]
    assert losses[3] < losses[2] < losses[0]


def test_a_bfloat16_net_trains_after_amp_init():
    # A process of its own: amp.init() changes all operators for good.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.mxnet.bfloat16_run"],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
    )
    assert done.returncode == 0, done.stderr
    followed, dense = done.stdout.splitlines()
    assert followed == "SoftmaxOutput follows the scale"
    assert dense in (DENSE_WORKS, DENSE_FAILS)


def test_the_example_trains_and_records(tmp_path):
    path = tmp_path / "run.gs"
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "examples/mxnet_gluon.py"),
            *("--json", "-o", str(path)),
        ],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert np.allclose(found["slope"], 2.0, atol=0.02)
    assert found["applied"] + found["skipped"] == 100
    # The sum over both devices is NaN on both.
    assert len(found["culprits"]) == 4
    with open_run(path) as run:
        assert len(list(run.steps())) == 100
