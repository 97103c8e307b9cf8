"""What MXNet's own scaler gets wrong, and ours right.

A scenario takes the name of a scaler and fails where the scaler does: MXNet's own must
fail each of them, and ours none.
"""

import math

import mxnet as mx
import pytest
from mxnet.contrib.amp import amp as mxnet_amp

from gradscale.errors import ConfigError
from gradscale.mxnet import amp
from tests.mxnet.nets import INF, attached, parameter, step, trainer_of, values

SCENARIOS = []


def scenario(function):
    SCENARIOS.append(function)
    return function


@scenario
def an_overflow_costs_one_step_and_one_halving(kind):
    weight = parameter()
    trainer = trainer_of(weight)
    scaler = attached(kind, trainer)
    # Finite at 2^15 and not at 2^16.
    for _ in range(3):
        step(kind, trainer, [2.0**112])
    assert scaler.loss_scale == 2.0**15
    assert values(weight) == [[1.0 - 2.0**112, 2.0 - 2.0**112]]


@scenario
def an_infinity_on_the_second_device_skips_the_step(kind):
    weight = parameter(devices=2)
    trainer = trainer_of(weight)
    attached(kind, trainer)
    step(kind, trainer, [1.0, INF])
    assert values(weight) == [[1.0, 2.0], [1.0, 2.0]]


@scenario
def the_scale_never_reaches_0(kind):
    weight = parameter()
    weight.grad()[:] = INF
    trainer = trainer_of(weight)
    scaler = attached(kind, trainer)
    for _ in range(1200):
        weight.grad()[:] = INF
        try:
            assert scaler.loss_scale > 0.0
            scaler.has_overflow([weight])
        except FloatingPointError:
            # Raised at the floor.
            pass


@scenario
def a_trainer_without_gradients_takes_no_step(kind):
    weight = parameter()
    weight.grad_req = "null"
    trainer = trainer_of(weight)
    scaler = attached(kind, trainer)
    assert scaler.loss_scale == 2.0**16
    trainer.step(1)
    assert scaler.loss_scale == 2.0**16


@scenario
def an_infinity_does_not_reach_the_weights_through_the_kvstore(kind):
    weight = parameter(devices=2)
    trainer = trainer_of(weight, kvstore="device", update_on_kvstore=True)
    try:
        attached(kind, trainer)
        step(kind, trainer, [1.0, INF])
    except ConfigError:
        pass
    assert all(map(math.isfinite, values(weight)[0]))


@scenario
def an_infinity_does_not_reach_the_weights_through_a_store_that_mxnet_chose(kind):
    weight = parameter(devices=2)
    trainer = trainer_of(weight, kvstore="device")
    attached(kind, trainer)
    step(kind, trainer, [1.0, INF])
    assert all(map(math.isfinite, values(weight)[0]))


@scenario
def an_infinity_that_clipping_hides_skips_the_step(kind):
    weight = parameter()
    trainer = trainer_of(weight)
    attached(kind, trainer)
    module = {"gradscale": amp, "mxnet": mxnet_amp}[kind]
    with mx.autograd.record():
        loss = (weight.data() * INF).sum()
        with module.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    module.unscale(trainer)
    grad = weight.grad()
    mx.nd.clip(grad, -1.0, 1.0, out=grad)
    trainer.update(1)
    assert values(weight) == [[1.0, 2.0]]


@scenario
def a_trainer_is_prepared_without_a_call_of_init(kind):
    trainer = trainer_of(parameter())
    {"gradscale": amp, "mxnet": mxnet_amp}[kind].init_trainer(trainer)
    assert trainer._amp_loss_scaler.loss_scale == 2.0**16


@scenario
def a_layer_that_the_next_batch_does_not_use_does_not_fail_it(kind):
    used, unused = parameter(name="used"), parameter(name="unused")
    trainer = trainer_of(used, unused)
    scaler = attached(kind, trainer)
    for factor in (INF, None, None):
        with mx.autograd.record():
            loss = used.data().sum()
            if factor is not None:
                loss = loss + (unused.data() * factor).sum()
            scaled = loss * scaler.loss_scale
        scaled.backward()
        trainer.step(1, ignore_stale_grad=True)
    assert values(used)[0][0] < 1.0


@pytest.mark.parametrize("run", SCENARIOS, ids=lambda run: run.__name__)
def test_gradscale_does(run):
    run("gradscale")


@pytest.mark.parametrize("run", SCENARIOS, ids=lambda run: run.__name__)
def test_mxnets_own_does_not(run):
    with pytest.raises((AssertionError, IndexError, ZeroDivisionError)):
        run("mxnet")
