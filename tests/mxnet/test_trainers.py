"""Trainers whose weights the key-value store updates are refused by name."""

import mxnet as mx
import pytest

from gradscale.errors import ConfigError
from gradscale.judge.catalogue import BY_CODE
from gradscale.mxnet import FP16Trainer, amp
from tests.mxnet.nets import CPU, INF, parameter, step, trainer_of, values

WAYS = {"init_trainer": amp.init_trainer, "FP16Trainer": FP16Trainer}
each_way = pytest.mark.parametrize("attach", WAYS.values(), ids=WAYS)


@each_way
def test_update_on_kvstore_is_refused_before_a_weight_changes(attach):
    weight = parameter(devices=2)
    trainer = trainer_of(weight, kvstore="device", update_on_kvstore=True)
    with pytest.raises(
        ConfigError, match=r"update_on_kvstore=True(.|\n)*=False.*GS131"
    ):
        attach(trainer)
    assert values(weight) == [[1.0, 2.0]] * 2
    assert getattr(trainer, "_amp_loss_scaler", None) is None


@each_way
def test_a_store_that_was_chosen_in_an_earlier_step_is_refused(attach):
    weight = parameter(devices=2)
    trainer = trainer_of(weight, kvstore="device")
    with mx.autograd.record():
        losses = [data.sum() for data in weight.list_data()]
    mx.autograd.backward(losses)
    trainer.step(1)
    assert trainer._update_on_kvstore
    with pytest.raises(ConfigError, match=r"^The Trainer has been used.*GS131"):
        attach(trainer)


@each_way
def test_sparse_weights_are_refused(attach):
    weight = mx.gluon.Parameter("rows", shape=(4, 2), stype="row_sparse")
    weight.initialize()
    with pytest.raises(ConfigError, match=r"sparse weights.*dense weights.*GS131"):
        attach(mx.gluon.Trainer([weight], "sgd"))


@each_way
def test_sparse_gradients_on_several_machines_are_refused(attach):
    weight = mx.gluon.Parameter("rows", shape=(4, 2), grad_stype="row_sparse")
    weight.initialize()
    with pytest.raises(ConfigError, match=r"sparse gradients on several.*GS131"):
        attach(trainer_of(weight, kvstore="dist_sync"))
    attach(trainer_of(weight, kvstore="device"))


@each_way
def test_an_asynchronous_store_is_refused(attach):
    with pytest.raises(ConfigError, match=r"asynchronous key-value store.*GS131"):
        attach(trainer_of(parameter(), kvstore="dist_async"))


def test_by_default_the_trainer_updates_its_weights_itself():
    weight = parameter(devices=2)
    trainer = trainer_of(weight, kvstore="device")
    scaler = amp.init_loss_scaling(trainer)
    step("gradscale", trainer, [1.0, INF])
    assert values(weight) == [[1.0, 2.0]] * 2
    step("gradscale", trainer, [1.0, 3.0])
    assert values(weight) == [[-1.0, 0.0]] * 2
    assert (scaler.loss_scale, scaler.skipped_steps) == (2.0**15, 1)


def test_the_example_of_the_code_leads_to_it():
    with pytest.raises(ConfigError, match="GS131"):
        exec(BY_CODE["GS131"].example, {})


def test_what_to_use_instead_does_not():
    exec(BY_CODE["GS131"].instead, {})


def test_parameters_that_are_initialized_in_the_first_batch_are_scaled():
    net = mx.gluon.nn.Dense(1)
    net.initialize(ctx=list(CPU[:1]))
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    scaler = amp.init_loss_scaling(trainer)
    with (
        mx.autograd.record(),
        amp.scale_loss(net(mx.nd.ones((2, 3))), trainer) as scaled,
    ):
        scaled.backward()
    trainer.step(2)
    assert scaler.last.applied
