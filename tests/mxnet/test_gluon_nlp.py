"""gluon-nlp's scalers have the scales that its versions have, and FP16Trainer trains.

tests/data/gluon_nlp_scales.json holds the scales of gluon-nlp itself.
"""

import inspect
import json
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from gradscale.errors import ConfigError, ScaleCollapsed
from gradscale.mxnet import (
    DynamicLossScaler,
    FP16Trainer,
    LossScaler,
    StaticLossScaler,
    amp,
)
from tests.mxnet.nets import INF, parameter, trainer_of, values

DATA = Path(__file__).parents[1] / "data" / "gluon_nlp_scales.json"
RECORDED = json.loads(DATA.read_text(encoding="utf-8"))
DEFAULTS = {
    "gluon-nlp v0.6.0": {"init_scale": 2.0**15, "tolerance": 0.05},
    "gluon-nlp v0.8.3": {"init_scale": 2.0**15, "tolerance": 0.01},
    "gluon-nlp v0.10.0": {"init_scale": 2.0**10, "tolerance": 0.0},
}
SEQUENCES = [
    pytest.param(version, sequence, id=f"{version} {sequence['settings']}")
    for version in DEFAULTS
    for sequence in RECORDED[version]["sequences"]
]


def scaler_of(version, settings):
    """Return the scaler of a recorded sequence; that of one setting is the static."""
    if settings == {"init_scale": 128}:
        return StaticLossScaler(**settings)
    return DynamicLossScaler(**{**DEFAULTS[version], **settings})


@pytest.mark.parametrize(("version", "sequence"), SEQUENCES)
def test_the_scales_are_those_of_gluon_nlp(version, sequence):
    scaler = scaler_of(version, sequence["settings"])
    seen = []
    for _, overflow, _ in sequence["steps"]:
        before = scaler.loss_scale
        scaler.update_scale(overflow)
        seen.append([before, overflow, scaler.loss_scale])
    assert seen == sequence["steps"]


def test_the_defaults_are_those_of_the_last_version():
    given = inspect.signature(DynamicLossScaler).parameters
    defaults = {name: given[name].default for name in ("init_scale", "tolerance")}
    assert defaults == DEFAULTS["gluon-nlp v0.10.0"]


def test_a_tolerated_overflow_keeps_the_scale_and_restarts_the_window():
    scaler = DynamicLossScaler(8.0, scale_window=4, tolerance=0.3)
    scales = []
    for overflow in (False, False, False, True, False, False, False, False):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8.0] * 7 + [16.0]


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_that_cannot_work_is_refused(tolerance):
    with pytest.raises(ConfigError, match=r"tolerance=.*share of steps.*Pass 0\.0"):
        DynamicLossScaler(tolerance=tolerance)


@pytest.mark.parametrize("kind", [DynamicLossScaler, StaticLossScaler])
def test_an_overflow_on_any_device_is_seen(kind):
    weight = parameter(devices=2)
    assert not kind().has_overflow([weight])
    weight.list_grad()[1][:] = INF
    assert kind().has_overflow([weight])


# --- FP16Trainer ----------------------------------------------------------------------


def stepped(trainer, weight, factors, **options):
    """Take one step whose gradient on each device is a factor times ones."""
    with mx.autograd.record():
        losses = [
            (data * factor).sum()
            for data, factor in zip(weight.list_data(), factors, strict=True)
        ]
    trainer.backward(losses if len(losses) > 1 else losses[0])
    trainer.step(1, **options)


def made(devices=1, **options):
    weight = parameter(devices=devices)
    trainer = trainer_of(weight, kvstore="device", update_on_kvstore=False)
    return FP16Trainer(trainer, **options), weight


def test_a_step_is_that_of_the_plain_trainer():
    trainer, weight = made()
    stepped(trainer, weight, [4.0])
    assert values(weight) == [[-1.0, 0.0]]
    assert trainer.last.applied
    assert trainer.last.record.loss == 12.0


def test_the_gradients_of_devices_are_summed():
    trainer, weight = made(devices=2)
    stepped(trainer, weight, [1.0, 3.0])
    assert values(weight) == [[-1.0, 0.0]] * 2


@pytest.mark.parametrize("device", [0, 1])
def test_an_overflow_on_a_device_costs_one_step_and_one_halving(device):
    trainer, weight = made(devices=2)
    factors = [1.0, 1.0]
    factors[device] = INF
    stepped(trainer, weight, factors)
    assert values(weight) == [[1.0, 2.0]] * 2
    assert not trainer.last.applied
    stepped(trainer, weight, [1.0, 3.0])
    assert trainer.last.scale == 2.0**9
    assert values(weight) == [[-1.0, 0.0]] * 2


def test_clipping_is_by_the_unscaled_norm():
    trainer, weight = made()
    stepped(trainer, weight, [4.0], max_norm=np.sqrt(2.0))
    # The norm is 4 sqrt 2: a quarter of the gradient is left.
    assert np.allclose(values(weight), [[0.5, 1.5]], rtol=1e-6)
    assert trainer.last.grad_norm == pytest.approx(4.0 * np.sqrt(2.0))


def test_a_norm_below_the_limit_changes_nothing():
    trainer, weight = made()
    stepped(trainer, weight, [4.0], max_norm=100.0)
    assert values(weight) == [[-1.0, 0.0]]


def test_a_static_scale_stays():
    trainer, weight = made(
        dynamic_loss_scale=False, loss_scaler_params={"init_scale": 4}
    )
    stepped(trainer, weight, [INF])
    stepped(trainer, weight, [4.0])
    assert (trainer.last.scale, values(weight)) == (4.0, [[-1.0, 0.0]])


def test_at_the_floor_the_third_step_raises():
    trainer, weight = made(loss_scaler_params={"init_scale": 2.0, "min_scale": 1.0})
    for _ in range(3):
        stepped(trainer, weight, [INF])
    with pytest.raises(ScaleCollapsed, match=r"floor of 1 .* 3 steps .* weight.*GS202"):
        stepped(trainer, weight, [INF])
    assert values(weight) == [[1.0, 2.0]]


def test_a_trainer_with_a_scaler_is_refused():
    trainer = trainer_of(parameter())
    amp.init_trainer(trainer)
    assert isinstance(trainer._amp_loss_scaler, LossScaler)
    with pytest.raises(ConfigError, match="two scales"):
        FP16Trainer(trainer)
