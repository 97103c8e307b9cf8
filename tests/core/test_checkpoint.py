"""The checkpoint format: what is written, what is read, what is refused."""

import copy
import io
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradscale.torch
from gradscale import DynamicScale, NoScale, StateError, StaticScale
from gradscale.core.checkpoint import FORMAT, TORCH_KEYS, Saved, pack, unpack
from gradscale.core.checkpoint import POLICIES as KINDS
from gradscale.core.policies import HIGHEST_SCALE, LOWEST_SCALE
from tests.strategies import COUNTS, POLICIES, SCALES, dynamic_policies

GOLDEN = Path(__file__).parent / "golden"
TALLIES = st.lists(st.tuples(COUNTS, COUNTS), max_size=4).map(tuple)


@st.composite
def saved_states(draw, policies=POLICIES):
    policy = draw(policies)
    return Saved(
        policy=policy,
        scale=draw(st.floats(policy.min_scale, policy.max_scale, width=32)),
        finite_steps=draw(COUNTS),
        debt=draw(COUNTS),
        floor_steps=draw(COUNTS),
        calibrated=draw(st.booleans()),
        grown=draw(st.booleans()),
        tallies=draw(TALLIES),
    )


@pytest.fixture
def packed():
    """An intact checkpoint of the default policy."""
    return pack(Saved(policy=DynamicScale(), scale=65536.0))


@pytest.fixture
def of_torch():
    """A checkpoint written by torch's own class."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()


def with_extra(packed, **changes):
    return {**packed, "gradscale": {**packed["gradscale"], **changes}}


def refusal(state, policy=None):
    """Return the error that a state is refused with."""
    with pytest.raises(StateError) as error:
        unpack(state, DynamicScale() if policy is None else policy)
    return error.value


# --- what is written ------------------------------------------------------------------


def test_every_format_has_a_sample():
    samples = {path.name for path in GOLDEN.glob("*.json")}
    assert samples == {f"format_{number}.json" for number in range(1, FORMAT + 1)}


FORMAT_1 = Saved(
    policy=DynamicScale(
        init_scale=1024.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=500,
        min_scale=2.0**-10,
        max_scale=2.0**30,
        tolerance=0.05,
    ),
    scale=4096.0,
    finite_steps=123,
    debt=17,
    floor_steps=0,
    calibrated=True,
    grown=True,
    tallies=((40, 2), (40, 2), (38, 4)),
)


def golden(number):
    text = (GOLDEN / f"format_{number}.json").read_text(encoding="utf-8")
    return json.loads(text)


def test_the_sample_of_format_1_is_read():
    assert unpack(golden(1), NoScale()) == FORMAT_1


def test_the_present_format_is_written_as_its_sample():
    assert pack(FORMAT_1) == golden(FORMAT)


def test_the_keys_are_those_of_torch_and_one_more(packed):
    assert tuple(packed) == (*TORCH_KEYS, "gradscale")


def test_the_keys_of_torch_are_the_keys_of_torch(of_torch):
    assert tuple(of_torch) == TORCH_KEYS


@pytest.mark.parametrize(
    "policy", [NoScale(), StaticScale(scale=8.0)], ids=["none", "static"]
)
def test_a_fixed_scale_is_written_with_factors_of_one(policy):
    packed = pack(Saved(policy=policy, scale=policy.min_scale))
    assert (packed["growth_factor"], packed["backoff_factor"]) == (1.0, 1.0)


# --- there and back -------------------------------------------------------------------


@given(saved_states(), POLICIES)
def test_packing_and_unpacking_is_the_identity_whatever_is_in_use(saved, in_use):
    assert unpack(pack(saved), in_use) == saved


@given(saved_states())
def test_a_checkpoint_survives_json(saved):
    assert unpack(json.loads(json.dumps(pack(saved))), NoScale()) == saved


@given(saved_states())
def test_a_checkpoint_survives_torch_save_with_weights_only(saved):
    buffer = io.BytesIO()
    torch.save(pack(saved), buffer)
    buffer.seek(0)
    assert unpack(torch.load(buffer, weights_only=True), NoScale()) == saved


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_policy_comes_back(kind):
    policy = kind(scale=8.0) if kind is StaticScale else kind()
    saved = Saved(policy=policy, scale=policy.init_state().scale)
    assert unpack(pack(saved), NoScale()).policy == policy


# --- torch's own checkpoints ----------------------------------------------------------


@given(saved_states(policies=dynamic_policies()))
def test_torch_loads_what_is_written_here(saved):
    scaler = torch.amp.GradScaler("cpu")
    packed = pack(saved)
    scaler.load_state_dict(packed)
    assert scaler.state_dict() == {key: packed[key] for key in TORCH_KEYS}


@given(SCALES, st.floats(1.5, 8.0), st.floats(0.1, 0.9), st.integers(1, 5000), COUNTS)
def test_what_torch_wrote_is_read(scale, growth, backoff, interval, count):
    scaler = torch.amp.GradScaler("cpu", scale, growth, backoff, interval)
    scaler._init_growth_tracker = count
    in_use = DynamicScale(min_scale=LOWEST_SCALE, max_scale=HIGHEST_SCALE)
    expected = DynamicScale(
        init_scale=scale,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        min_scale=LOWEST_SCALE,
        max_scale=HIGHEST_SCALE,
    )
    saved = unpack(scaler.state_dict(), in_use)
    assert saved[:3] == (expected, scale, count)


def test_what_torch_does_not_tell_comes_from_the_policy_in_use(of_torch):
    in_use = DynamicScale(min_scale=0.5, max_scale=2.0**20, tolerance=0.1)
    policy = unpack(of_torch, in_use).policy
    bounds = (policy.min_scale, policy.max_scale, policy.tolerance)
    assert bounds == (0.5, 2.0**20, 0.1)


def test_a_run_of_torch_counts_as_calibrated(of_torch):
    assert unpack(of_torch, DynamicScale()).calibrated


@pytest.mark.parametrize(
    "in_use", [NoScale(), StaticScale(scale=2.0)], ids=["none", "static"]
)
def test_a_moving_scale_of_torch_replaces_a_fixed_one(in_use, of_torch):
    policy = unpack(of_torch, in_use).policy
    assert policy == DynamicScale(init_scale=1024.0)


def test_factors_of_one_mean_a_fixed_scale(of_torch):
    fixed = {**of_torch, "growth_factor": 1.0, "backoff_factor": 1.0}
    assert unpack(fixed, DynamicScale()).policy == StaticScale(scale=1024.0)


def test_a_fixed_scale_goes_through_torch_and_comes_back():
    there = torch.amp.GradScaler("cpu")
    there.load_state_dict(pack(Saved(policy=StaticScale(scale=8.0), scale=8.0)))
    back = unpack(there.state_dict(), StaticScale(scale=8.0))
    assert back.policy == StaticScale(scale=8.0)


def test_no_scale_goes_through_torch_and_comes_back():
    there = torch.amp.GradScaler("cpu")
    there.load_state_dict(pack(Saved(policy=NoScale(), scale=1.0)))
    assert unpack(there.state_dict(), NoScale()).policy == NoScale()


def test_the_five_keys_win_over_the_policy_because_other_tools_edit_those(packed):
    edited = {**packed, "growth_interval": 100, "scale": 8.0}
    saved = unpack(edited, DynamicScale())
    assert (saved.policy.growth_interval, saved.scale) == (100, 8.0)


def test_a_scale_is_rounded_to_the_f32_it_will_be(packed):
    assert unpack({**packed, "scale": 1000.1}, DynamicScale()).scale == (
        torch.tensor(1000.1).item()
    )


# --- what is refused ------------------------------------------------------------------

NOTHING_LOADED = (
    "Resuming from it would corrupt the run. Nothing was loaded; repair the value, or "
    "start without this checkpoint. To widen the bounds, pass "
    "policy=DynamicScale(min_scale=..., max_scale=...). [GS302]"
)
BOUNDS = "[5.96046e-08, 8.50706e+37]"


@pytest.mark.parametrize("state", [None, 3, [1.0], "scale"], ids=repr)
def test_what_is_not_a_dict_is_refused(state):
    assert str(refusal(state)) == (
        f"The checkpoint is a {type(state).__name__}, not a dict. It contains no "
        "scale. Load a dict returned by state_dict(). [GS302]"
    )


def test_an_empty_dict_is_refused_in_the_words_of_torch():
    assert str(refusal({})).splitlines() == [
        "The source state dict is empty, possibly because it was saved from a disabled "
        "instance of GradScaler.",
        "The checkpoint is an empty dict. A disabled scaler saves nothing, so there is "
        "no scale to resume from. Save from an enabled scaler, or do not load this "
        "checkpoint. [GS302]",
    ]


def test_torch_refuses_an_empty_dict_in_these_words():
    with pytest.raises(RuntimeError) as error:
        torch.amp.GradScaler("cpu").load_state_dict({})
    assert str(error.value) == str(refusal({})).splitlines()[0]


@pytest.mark.parametrize("key", TORCH_KEYS)
def test_a_missing_key_is_named(packed, key):
    del packed[key]
    assert str(refusal(packed)) == (
        f"The checkpoint lacks {key}. Without it, the run would resume from a "
        "different state than the saved one. Load a dict returned by state_dict(). "
        "[GS302]"
    )


def test_all_missing_keys_are_named():
    assert str(refusal({"scale": 1.0})).startswith(
        "The checkpoint lacks growth_factor, backoff_factor, growth_interval, "
        "_growth_tracker. "
    )


@pytest.mark.parametrize("extra", [3, [], {}, {"format": "1"}, {"format": None}])
def test_an_unreadable_part_of_our_own_is_refused(packed, extra):
    assert str(refusal({**packed, "gradscale": extra})) == (
        f"The checkpoint has gradscale={extra!r}, which is not a dict with a format "
        f"number. {NOTHING_LOADED}"
    )


@pytest.mark.parametrize("number", [FORMAT + 1, 1000, 0, -1])
def test_a_format_that_this_version_does_not_know_is_refused(packed, number):
    error = refusal(with_extra(packed, format=number))
    assert error.code == "GS303"
    assert str(error) == (
        f"The checkpoint has format {number}. This version reads formats up to "
        f"{FORMAT} and would misread the rest. Install the version of gradscale that "
        "wrote it, or a newer one. [GS303]"
    )


@pytest.mark.parametrize(
    "policy", [None, "DynamicScale", {}, {"kind": "Headroom"}, {"kind": ["NoScale"]}]
)
def test_a_policy_that_this_version_does_not_know_is_refused(packed, policy):
    assert str(refusal(with_extra(packed, policy=policy))) == (
        f"The checkpoint has policy={policy!r}, which is not one of NoScale, "
        f"StaticScale, DynamicScale. {NOTHING_LOADED}"
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"kind": "StaticScale", "scale": 0.0},
            "scale=0.0 is outside [1.17549e-38, 3.40282e+38].",
        ),
        (
            {"kind": "DynamicScale", "tolerance": 0.7},
            "tolerance=0.7 is not a share of steps in [0, 0.5).",
        ),
        (
            {"kind": "DynamicScale", "warp": 9},
            "DynamicScale.__init__() got an unexpected keyword argument 'warp'.",
        ),
    ],
    ids=["static", "dynamic", "unknown"],
)
def test_a_policy_that_cannot_work_is_refused_with_its_reason(packed, settings, reason):
    text = str(refusal(with_extra(packed, policy=settings)))
    assert text.startswith(
        f"The checkpoint describes a policy that cannot work: {reason}"
    )
    assert text.endswith(
        ". Nothing was loaded. Save again from an intact run, or start without this "
        "checkpoint. [GS302]"
    )


def test_a_policy_of_which_a_part_is_missing_is_refused_and_the_part_is_named(packed):
    whole = packed["gradscale"]["policy"]
    part = {k: v for k, v in whole.items() if k not in ("min_scale", "tolerance")}
    assert str(refusal(with_extra(packed, policy=part))) == (
        "The checkpoint lacks min_scale, tolerance of its DynamicScale. With "
        "defaults, the run would resume with a different rule than the saved one. "
        "Nothing was loaded; load into a scaler with a DynamicScale, or save again "
        "from an intact run. [GS302]"
    )


def test_moves_that_only_the_five_keys_have_are_enough(packed):
    moves = ("growth_factor", "backoff_factor", "growth_interval")
    whole = packed["gradscale"]["policy"]
    part = {k: v for k, v in whole.items() if k not in moves}
    assert unpack(with_extra(packed, policy=part), NoScale()) == unpack(
        packed, NoScale()
    )


def test_a_factor_of_torch_that_cannot_work_is_refused_with_our_reason(of_torch):
    text = str(refusal({**of_torch, "growth_factor": 0.5}))
    assert "growth_factor=0.5 can never raise the scale." in text


@pytest.mark.parametrize(
    "scale",
    [0.0, -1.0, math.nan, math.inf, 2.0**-25, 2.0**127, 10**400, "65536", None, True],
    ids=lambda scale: repr(scale)[:20],
)
def test_a_scale_that_cannot_be_gone_on_with_is_refused(packed, scale):
    assert str(refusal({**packed, "scale": scale})) == (
        f"The checkpoint has scale={scale!r}, which is not a number in {BOUNDS}. "
        f"{NOTHING_LOADED}"
    )


def test_a_fixed_scale_that_does_not_fit_its_policy_is_refused():
    packed = pack(Saved(policy=StaticScale(scale=8.0), scale=8.0))
    assert str(refusal({**packed, "scale": 16.0})) == (
        "The checkpoint has scale=16.0, which is not a number in [8, 8]. "
        f"{NOTHING_LOADED}"
    )


@pytest.mark.parametrize("count", [-1, 1.0, "3", None, True], ids=repr)
def test_a_count_of_finite_steps_that_is_none_is_refused(packed, count):
    assert str(refusal({**packed, "_growth_tracker": count})) == (
        f"The checkpoint has _growth_tracker={count!r}, which is not a whole number, 0 "
        f"or more. {NOTHING_LOADED}"
    )


@pytest.mark.parametrize("count", [-1, 0.5, "3", True], ids=repr)
@pytest.mark.parametrize("name", ["debt", "floor_steps"])
def test_a_count_of_our_own_that_is_none_is_refused(packed, name, count):
    assert str(refusal(with_extra(packed, **{name: count}))) == (
        f"The checkpoint has {name}={count!r}, which is not a whole number, 0 or more. "
        f"{NOTHING_LOADED}"
    )


def test_a_count_that_a_device_cannot_hold_is_refused(packed):
    assert str(refusal({**packed, "_growth_tracker": 2**31 - 1})) == (
        "The checkpoint has _growth_tracker=2147483647, which is not a count up to "
        f"2147483646. {NOTHING_LOADED}"
    )


@pytest.mark.parametrize("tallies", [3, [1], [[1, 2, 3]], {"a": 1}], ids=repr)
def test_tallies_that_are_no_pairs_are_refused(packed, tallies):
    assert str(refusal(with_extra(packed, tallies=tallies))) == (
        f"The checkpoint has tallies={tallies!r}, which is not a list of pairs of "
        f"counts. {NOTHING_LOADED}"
    )


def test_tallies_of_something_else_are_refused(packed):
    assert str(refusal(with_extra(packed, tallies=[[1, -2]]))) == (
        "The checkpoint has tallies=-2, which is not a whole number, 0 or more. "
        f"{NOTHING_LOADED}"
    )


# --- all or nothing -------------------------------------------------------------------


@given(saved_states())
def test_reading_does_not_change_the_dict(saved):
    packed = pack(saved)
    before = copy.deepcopy(packed)
    unpack(packed, NoScale())
    assert packed == before


@pytest.mark.parametrize(
    "broken",
    [
        lambda packed: {},
        lambda packed: {"scale": 1.0},
        lambda packed: {**packed, "scale": math.nan},
        lambda packed: {**packed, "_growth_tracker": -1},
        lambda packed: with_extra(packed, format=1000),
        lambda packed: with_extra(packed, tallies=[[1, -2]]),
    ],
    ids=["empty", "partial", "nan", "count", "newer", "tallies"],
)
def test_a_scaler_that_refuses_a_checkpoint_stays_as_it_was(packed, broken):
    scaler = gradscale.torch.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises(StateError):
        scaler.load_state_dict(broken(packed))
    assert scaler.state_dict() == before
