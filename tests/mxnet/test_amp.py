"""The functions of `amp`: passed through, or MXNet's with our scaler."""

import json
import warnings

import mxnet as mx
import pytest
from mxnet.contrib import amp as mxnet_amp

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.errors import (
    ConfigError,
    GradscaleWarning,
    OrderError,
    ScaleCollapsed,
    StateError,
)
from gradscale.mxnet import LossScaler, amp
from tests.mxnet.nets import INF, NAN, parameter, step, trainer_of, values

# Ours instead of MXNet's.
OWN = {"init_trainer", "scale_loss", "unscale"}


def test_every_name_of_mxnet_is_there():
    assert set(mxnet_amp.amp.__all__) <= set(amp.__all__)


@pytest.mark.parametrize("name", sorted(set(amp.__all__) - OWN - {"init_loss_scaling"}))
def test_casts_are_those_of_mxnet(name):
    assert getattr(amp, name) is getattr(mxnet_amp.amp, name)


def test_a_single_loss_and_a_list_are_scaled():
    trainer = trainer_of(parameter())
    amp.init_trainer(trainer)
    loss = mx.nd.array([1.0, 3.0])
    with amp.scale_loss(loss, trainer) as scaled:
        assert scaled.asnumpy().tolist() == [2.0**16, 3 * 2.0**16]
    with amp.scale_loss([loss, loss], trainer) as several:
        assert [each.asnumpy().tolist() for each in several] == [
            [2.0**16, 3 * 2.0**16]
        ] * 2


def test_the_trainers_own_factor_is_kept():
    weight = parameter()
    sgd = mx.optimizer.SGD(learning_rate=1.0, rescale_grad=0.5)
    trainer = mx.gluon.Trainer([weight], sgd)
    amp.init_trainer(trainer)
    # A second call replaces the scaler, and does not divide a second time.
    step("gradscale", trainer, [2.0])
    amp.init_trainer(trainer)
    step("gradscale", trainer, [2.0], batch_size=2)
    assert values(weight) == [[-0.5, 0.5]]


@pytest.mark.parametrize("call", [amp.init_trainer, amp.unscale])
def test_an_optimizer_is_refused(call):
    with pytest.raises(
        TypeError, match=r"SGD was passed, an optimizer.*Pass the Trainer"
    ):
        call(mx.optimizer.SGD())


def test_something_else_is_refused():
    with pytest.raises(
        TypeError, match=r"str was passed.*Pass a mxnet\.gluon\.Trainer"
    ):
        amp.init_trainer("trainer")


@pytest.mark.parametrize(
    "call", [amp.unscale, lambda t: amp.scale_loss(1, t).__enter__()]
)
def test_a_trainer_without_a_scaler_is_refused(call):
    with pytest.raises(OrderError, match=r"did you forget(.|\n)*init_trainer.*GS102"):
        call(trainer_of(parameter()))


# --- settings -------------------------------------------------------------------------


def test_the_settings_of_init_trainer_are_those_of_mxnet():
    trainer = trainer_of(parameter())
    amp.init_trainer(trainer)
    assert trainer._amp_loss_scaler.policy == DynamicScale(max_scale=2.0**24)


def test_settings_make_a_dynamic_policy():
    scaler = amp.init_loss_scaling(
        trainer_of(parameter()), init_scale=8.0, tolerance=0.1
    )
    expected = DynamicScale(init_scale=8.0, tolerance=0.1, max_scale=2.0**24)
    assert scaler.policy == expected


def test_the_ceiling_holds():
    weight = parameter()
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer, growth_interval=1, init_scale=2.0**23)
    for _ in range(3):
        step("gradscale", trainer, [0.0])
    assert scaler.loss_scale == 2.0**24


@pytest.mark.parametrize("policy", [StaticScale(scale=4.0), NoScale()])
def test_a_fixed_scale_skips_without_an_end(policy):
    weight = parameter()
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer, policy)
    for _ in range(5):
        step("gradscale", trainer, [INF])
    assert (scaler.skipped_steps, scaler.loss_scale) == (5, policy.min_scale)
    assert values(weight) == [[1.0, 2.0]]


def test_a_policy_and_settings_are_refused():
    with pytest.raises(ConfigError, match="init_scale was passed together"):
        amp.init_loss_scaling(trainer_of(parameter()), NoScale(), init_scale=8.0)


@pytest.mark.parametrize("policy", [DynamicScale, 65536.0])
def test_something_else_than_a_policy_is_refused(policy):
    with pytest.raises(
        ConfigError, match=r"settings and a rule.*Pass DynamicScale\(\)"
    ):
        LossScaler(policy)


# --- steps ----------------------------------------------------------------------------


def test_the_outcome_of_a_step_has_its_facts():
    trainer = trainer_of(parameter(devices=2))
    scaler = amp.init_loss_scaling(trainer, init_scale=8.0)
    step("gradscale", trainer, [1.0, NAN])
    record = scaler.last.record
    assert (record.step, record.scale, record.applied) == (1, 8.0, False)
    assert (record.nan, record.loss_finite) == (True, False)
    step("gradscale", trainer, [1.0, -3.0])
    assert (scaler.last.amax, scaler.last.record.loss) == (12.0, -3.0)
    assert str(scaler.last.verdict) == "ok"


def test_a_finite_loss_that_overflows_in_float16_is_told_apart():
    weight = parameter(dtype="float16")
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer, init_scale=2.0**12)
    step("gradscale", trainer, [100.0])
    assert str(scaler.last.verdict) == "loss_overflow"


def test_at_the_floor_the_third_step_raises_and_changes_nothing():
    weight = parameter()
    trainer = trainer_of(weight)
    amp.init_loss_scaling(trainer, init_scale=2.0, min_scale=1.0)
    for _ in range(3):
        step("gradscale", trainer, [INF])
    with pytest.raises(ScaleCollapsed, match=r"floor of 1 .* 3 steps .* weight.*GS202"):
        step("gradscale", trainer, [INF])
    assert values(weight) == [[1.0, 2.0]]


def test_without_gradients_the_verdict_says_so():
    weight = parameter()
    weight.grad_req = "null"
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer)
    trainer.step(1)
    assert str(scaler.last.verdict) == "no_gradients"
    assert (scaler.applied_steps, scaler.skipped_steps) == (0, 0)


def test_accumulated_gradients_are_unscaled_once():
    weight = parameter()
    weight.grad_req = "add"
    trainer = trainer_of(weight)
    amp.init_trainer(trainer)
    for factor in (1.0, 3.0):
        with (
            mx.autograd.record(),
            amp.scale_loss((weight.data() * factor).sum(), trainer) as scaled,
        ):
            scaled.backward()
    trainer.step(1)
    assert values(weight) == [[-1.0, 0.0]]


def test_a_loss_that_was_not_scaled_is_reported_once():
    weight = parameter()
    trainer = trainer_of(weight)
    amp.init_trainer(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with mx.autograd.record():
                loss = weight.data().sum()
            loss.backward()
            trainer.step(1)
    (message,) = [w.message for w in caught if isinstance(w.message, GradscaleWarning)]
    assert message.code == "GS114"
    assert "amp.scale_loss" in str(message)


# --- unscale --------------------------------------------------------------------------


def clipped_step(weight, trainer, factor, limit):
    with mx.autograd.record():
        loss = (weight.data() * factor).sum()
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.allreduce_grads()
    amp.unscale(trainer)
    grad = weight.grad()
    mx.nd.clip(grad, -limit, limit, out=grad)
    trainer.update(1)


def test_gradients_can_be_clipped_after_unscale():
    weight = parameter()
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer, init_scale=8.0)
    clipped_step(weight, trainer, 4.0, limit=1.0)
    assert values(weight) == [[0.5, 1.5]]
    # Of the scaled gradients.
    assert scaler.last.amax == 32.0


def test_an_infinity_that_clipping_hides_skips_the_step():
    weight = parameter()
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer)
    clipped_step(weight, trainer, INF, limit=1.0)
    assert values(weight) == [[1.0, 2.0]]
    assert scaler.last.culprits == ("weight",)


def test_a_value_that_clipping_makes_skips_the_step():
    weight = parameter()
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer)
    with mx.autograd.record(), amp.scale_loss(weight.data().sum(), trainer) as scaled:
        scaled.backward()
    amp.unscale(trainer)
    # A norm of 0 by which it is divided, for instance.
    weight.grad()[:] = NAN
    trainer.update(1)
    assert not scaler.last.applied
    assert values(weight) == [[1.0, 2.0]]


@pytest.mark.filterwarnings("ignore:Accumulating with float16 in optimizer")
def test_float16_gradients_are_reported_when_they_are_unscaled():
    weight = parameter(dtype="float16")
    trainer = trainer_of(weight)
    amp.init_loss_scaling(trainer, init_scale=8.0)
    with pytest.warns(GradscaleWarning, match=r"1 float16 gradients.*weight.*GS105"):
        clipped_step(weight, trainer, 1.0, limit=1.0)


# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [DynamicScale(growth_interval=3, tolerance=0.2), StaticScale(scale=4.0)]
)
def test_a_resumed_run_goes_on_like_one_that_was_not_stopped(policy, tmp_path):
    trace = [1.0, INF, 1.0, INF, INF, 1.0, 1.0, 1.0, 1.0, INF]
    whole, seen = trainer_of(parameter()), []
    scaler = amp.init_loss_scaling(whole, policy)
    for factor in trace:
        step("gradscale", whole, [factor])
        seen.append(repr(scaler.last))
    first = trainer_of(parameter())
    scaler = amp.init_loss_scaling(first, policy)
    for factor in trace[:5]:
        step("gradscale", first, [factor])
    kept = json.dumps(scaler.state_dict())
    second = trainer_of(parameter())
    scaler = amp.init_loss_scaling(second)
    scaler.load_state_dict(json.loads(kept))
    for factor, expected in zip(trace[5:], seen[5:], strict=True):
        step("gradscale", second, [factor])
        assert repr(scaler.last) == expected


def test_a_damaged_state_is_refused_and_changes_nothing():
    scaler = LossScaler()
    before = scaler.state_dict()
    with pytest.raises(StateError, match="GS302"):
        scaler.load_state_dict({**before, "scale": -1.0})
    assert scaler.state_dict() == before


def test_the_states_of_the_trainer_are_saved_as_before(tmp_path):
    weight = parameter()
    trainer = mx.gluon.Trainer([weight], "adam")
    amp.init_trainer(trainer)
    step("gradscale", trainer, [1.0])
    trainer.save_states(str(tmp_path / "states"))
    trainer.load_states(str(tmp_path / "states"))
    step("gradscale", trainer, [1.0])
