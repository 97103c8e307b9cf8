"""States of other scalers go on here as they would have gone on there."""

import copy
import json

import numpy as np
import pytest
import torch

import gradscale
import gradscale.torch
from gradscale import DynamicScale, StaticScale
from gradscale.core.checkpoint import Saved, pack, unpack
from gradscale.core.foreign_checkpoint import Source
from gradscale.core.foreign_rules import SOURCES
from tests.core.imported import (
    SAMPLES,
    following,
    imported,
    refusal,
    saved_in,
    telling,
    unrolled,
)

each_sample = pytest.mark.parametrize("name", SAMPLES)


# --- the samples ----------------------------------------------------------------------


def test_every_source_has_a_sample():
    assert {sample["source"] for sample in SAMPLES.values()} == set(SOURCES)


def test_the_names_of_the_sources_are_those_of_the_type():
    assert set(SOURCES) == set(Source.__args__)


@each_sample
def test_the_scales_that_follow_are_those_of_the_other_scaler(name):
    sample = SAMPLES[name]
    flags, wanted = unrolled(sample["finite"]), unrolled(sample["scales"])
    agreed = sample["agrees_for"]
    assert len(flags) == len(wanted)
    assert following(imported(name), flags)[:agreed] == wanted[:agreed]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, sample in SAMPLES.items()
        if sample["agrees_for"] < len(unrolled(sample["finite"]))
    ],
)
def test_a_rule_that_cannot_be_said_parts_where_the_sample_says(name):
    sample = SAMPLES[name]
    agreed = sample["agrees_for"]
    scales = following(imported(name), unrolled(sample["finite"]))
    assert scales[agreed] != unrolled(sample["scales"])[agreed]


@pytest.mark.parametrize("name", [n for n in SAMPLES if n != "deepspeed_static"])
def test_the_scaler_of_torch_goes_on_as_the_rule_does(name):
    scaler = gradscale.torch.GradScaler("cpu")
    scaler.load_state_dict(imported(name))
    flags = unrolled(SAMPLES[name]["finite"])[:12]
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for finite in flags:
        scaler.scale(weight.sum())
        weight.grad = torch.ones(1) if finite else torch.full((1,), torch.inf)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == following(imported(name), flags)


@each_sample
def test_importing_does_not_change_what_was_saved(name):
    saved = saved_in(name)
    before = copy.deepcopy(saved)
    source = SAMPLES[name]["source"] if name == "apex_contrib" else None
    gradscale.import_state(saved, source=source)
    assert saved == before


@each_sample
def test_what_was_imported_is_imported_again_unchanged(name):
    state = imported(name)
    assert gradscale.import_state(state) == state


@each_sample
def test_what_was_imported_is_plain(name):
    assert json.loads(json.dumps(imported(name))) == imported(name)


@each_sample
def test_naming_the_source_changes_nothing(name):
    named = imported(name, source=SAMPLES[name]["source"])
    assert named == imported(name)


# --- what each of them becomes --------------------------------------------------------


def test_settings_of_torch_are_kept():
    saved = torch.amp.GradScaler("cpu", 512.0, 4.0, 0.25, 70).state_dict()
    state = gradscale.import_state(saved)
    assert unpack(state, DynamicScale()) == Saved(
        policy=DynamicScale(
            init_scale=512.0,
            growth_factor=4.0,
            backoff_factor=0.25,
            growth_interval=70,
        ),
        scale=512.0,
        calibrated=True,
    )


def test_tensors_in_a_state_of_torch_are_read():
    saved = torch.amp.GradScaler("cpu").state_dict()
    saved["scale"] = torch.tensor([256.0])
    saved["_growth_tracker"] = torch.tensor(7, dtype=torch.int32)
    state = gradscale.import_state(saved)
    assert (state["scale"], state["_growth_tracker"]) == (256.0, 7)


def test_the_scaler_of_apex_ends_at_its_own_ceiling():
    assert unpack(imported("apex_amp"), DynamicScale()).policy.max_scale == 2.0**24


def test_one_of_several_losses_of_apex_is_imported_by_itself():
    saved = {
        "loss_scaler0": {"loss_scale": 8.0, "unskipped": 1},
        "loss_scaler1": {"loss_scale": 32.0, "unskipped": 5},
    }
    state = gradscale.import_state(saved["loss_scaler1"])
    assert (state["scale"], state["_growth_tracker"]) == (32.0, 5)


def test_several_losses_of_apex_are_refused_with_a_way_out():
    loss = {"loss_scale": 8.0, "unskipped": 1}
    error = refusal({"loss_scaler0": loss, "loss_scaler1": loss})
    assert error.code == "GS304"
    assert "2 scalers" in str(error)
    assert "saved['loss_scaler1']" in str(error)


def test_a_fixed_scale_of_apex_is_told_by_its_count():
    error = refusal({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 2000}})
    assert error.code == "GS302"
    assert "StaticScale(scale=128.0)" in str(error)


def test_a_longer_interval_of_apex_can_be_given():
    saved = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 2000}}
    state = gradscale.import_state(saved, growth_interval=3000)
    assert (state["growth_interval"], state["_growth_tracker"]) == (3000, 2000)


def test_a_fixed_scale_of_deepspeed_becomes_a_static_one():
    policy = unpack(imported("deepspeed_static"), DynamicScale()).policy
    assert policy == StaticScale(scale=128.0)


def test_a_hysteresis_of_one_needs_no_tolerance():
    policy = unpack(imported("deepspeed_zero"), DynamicScale()).policy
    assert policy.tolerance == 0.0


@pytest.mark.parametrize("interval", [1, 2, 3, 20, 48, 1000, 2**20])
def test_the_period_of_a_tolerance_is_one_more_than_the_interval(interval):
    state = imported("megatron", growth_interval=interval)
    policy = unpack(state, DynamicScale()).policy
    assert policy.period == max(interval + 1, 3)


@pytest.mark.parametrize(("left", "after"), [(2, 65536.0), (1, 32768.0), (0, 32768.0)])
def test_what_is_left_of_the_hysteresis_decides_on_the_next_overflow(left, after):
    saved = {"scale": 65536.0, "growth_tracker": 9, "hysteresis_tracker": left}
    assert following(gradscale.import_state(saved), [False]) == [after]


@pytest.mark.parametrize(("finite", "forgiven"), [(2, False), (3, True)])
def test_the_hysteresis_is_refilled_by_the_growth_and_not_before(finite, forgiven):
    saved = {"scale": 8.0, "growth_tracker": 7, "hysteresis_tracker": 1}
    state = gradscale.import_state(saved, growth_interval=10)
    *_, before, after = following(state, [True] * finite + [False])
    assert (after == before) is forgiven


@pytest.mark.parametrize(("finite", "forgiven"), [(6, False), (7, True)])
def test_the_tolerance_of_fairseq_decides_on_the_next_overflow(finite, forgiven):
    # One overflow in more than 10 steps since the scale moved is forgiven.
    fields = {**telling("fairseq_tolerance"), "_iter": 4, "_last_rescale_iter": 0}
    state = gradscale.import_state(fields)
    *_, before, after = following(state, [True] * finite + [False])
    assert (after == before) is forgiven


@pytest.mark.parametrize(("passed", "due"), [(0, 6), (1, 5), (5, 1), (6, 5), (10, 1)])
def test_deepspeed_grows_after_its_window_and_one_step_more(passed, due):
    fields = {**telling("deepspeed_zero"), "cur_iter": passed, "last_overflow_iter": -1}
    scales = following(gradscale.import_state(fields), [True] * due)
    assert scales == [32768.0] * (due - 1) + [65536.0]


def test_the_hysteresis_can_be_left_out():
    state = imported("megatron", tolerance=0.0)
    assert following(state, [True, False])[-1] == state["scale"] / 2


@pytest.mark.parametrize(("scale", "floor"), [(0.25, 0.25), (4.0, 1.0)])
def test_a_floor_that_is_not_saved_is_no_higher_than_the_scale(scale, floor):
    saved = {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 2}
    policy = unpack(gradscale.import_state(saved), DynamicScale()).policy
    assert policy.min_scale == floor


def test_a_scale_below_every_usual_floor_is_refused_until_one_is_given():
    saved = {"scale": 2.0**-30, "growth_tracker": 0, "hysteresis_tracker": 2}
    assert refusal(saved).code == "GS302"
    state = gradscale.import_state(saved, min_scale=2.0**-40)
    assert state["scale"] == 2.0**-30


def test_what_was_imported_has_found_its_scale_before():
    assert unpack(imported("megatron"), DynamicScale()).calibrated


def test_a_threshold_of_fairseq_is_a_floor():
    fields = {**telling("fairseq_scaler"), "threshold": 16.0}
    policy = unpack(gradscale.import_state(fields), DynamicScale()).policy
    assert policy.min_scale == 16.0


def test_the_interval_of_fairseq_can_be_given():
    assert imported("fairseq", growth_interval=256)["growth_interval"] == 256


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("fairseq", "last_optimizer_state"),
        ("deepspeed_zero", "optimizer_state_dict"),
        ("megatron_used", "optimizer"),
        ("flax_msgpack", "dynamic_scale"),
    ],
)
def test_a_scaler_is_found_in_a_larger_checkpoint(name, holder):
    whole = {"args": None, holder: saved_in(name)}
    assert gradscale.import_state(whole) == imported(name)


def test_a_floor_of_none_in_flax_is_the_lowest_there_is():
    saved = {"fin_steps": 0, "scale": 8.0, "minimum_scale": None}
    policy = unpack(gradscale.import_state(saved), DynamicScale()).policy
    assert policy.min_scale == 2.0**-126


@pytest.mark.parametrize(("flax_count", "interval"), [(False, 2000), (True, 2001)])
def test_the_drop_in_for_flax_goes_on_by_its_own_count(flax_count, interval):
    saved = {"fin_steps": 0, "scale": 8.0, "flax_count": flax_count}
    assert gradscale.import_state(saved)["growth_interval"] == interval


def test_a_floor_of_zero_in_jmp_is_the_lowest_there_is():
    fields = {**telling("jmp"), "min_loss_scale": 0.0}
    policy = unpack(gradscale.import_state(fields), DynamicScale()).policy
    assert policy.min_scale == 2.0**-126


def test_a_static_scale_of_jmp_is_read_when_it_is_named():
    state = gradscale.import_state({"loss_scale": np.float32(64.0)}, source="jmp")
    assert unpack(state, DynamicScale()).policy == StaticScale(scale=64.0)


def test_an_own_checkpoint_comes_back_as_it_is():
    policy = DynamicScale(max_scale=2.0**20, tolerance=0.1)
    state = pack(Saved(policy, 64.0, finite_steps=3, debt=5, tallies=((7, 1),)))
    assert gradscale.import_state(state) == state


def test_a_setting_is_put_into_an_own_checkpoint():
    state = pack(Saved(DynamicScale(), 64.0))
    changed = gradscale.import_state(state, max_scale=128.0)
    wanted = DynamicScale(init_scale=64.0, max_scale=128.0)
    assert unpack(changed, DynamicScale()).policy == wanted


def test_bounds_can_be_given_for_a_state_of_torch():
    saved = torch.amp.GradScaler("cpu").state_dict()
    state = gradscale.import_state(saved, min_scale=1.0, growth_interval=9)
    policy = unpack(state, DynamicScale()).policy
    assert policy == DynamicScale(min_scale=1.0, growth_interval=9)
