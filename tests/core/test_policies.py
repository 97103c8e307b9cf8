"""The policies: what they refuse, and what their rule holds to."""

import math
import random
from dataclasses import FrozenInstanceError, replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale import (
    PYTHON,
    ConfigError,
    DynamicScale,
    FixedState,
    NoScale,
    Observed,
    ScaleState,
    StaticScale,
)
from gradscale.core.policies import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.core.state import f32
from tests.strategies import (
    POLICIES,
    TOLERANCES,
    TRACES,
    any_policy,
    dynamic_policies,
    flags,
)

FINITE = Observed(True, 1.0, True)
NOT_FINITE = Observed(False, math.inf, True)


def run(policy, trace, state=None):
    """Return the states after each step of a trace of finite flags."""
    state = policy.init_state() if state is None else state
    states = []
    for finite in trace:
        seen = FINITE if finite else NOT_FINITE
        state = policy.next_state(state, seen, PYTHON.where)
        states.append(state)
    return states


def said(error):
    """Return gradscale's own words, which come last where torch has some too."""
    return str(error.value).splitlines()[-1]


# --- what is refused ------------------------------------------------------------------

RANGE = "[1.17549e-38, 3.40282e+38]"
BOUNDS = "[5.96046e-08, 8.50706e+37]"
REASON = (
    "Such a scale, or its inverse, is not a usable f32 or violates the bounds of the "
    "policy. Pass a value inside, or change min_scale and max_scale. [GS101]"
)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        pytest.param(
            kind, settings, f"{what} is outside {bounds}. {REASON}", id=what[:40]
        )
        for kind, settings, what, bounds in [
            (StaticScale, {"scale": 0.0}, "scale=0.0", RANGE),
            (StaticScale, {"scale": -1.0}, "scale=-1.0", RANGE),
            (StaticScale, {"scale": math.inf}, "scale=inf", RANGE),
            (StaticScale, {"scale": math.nan}, "scale=nan", RANGE),
            (StaticScale, {"scale": 1e39}, "scale=1e+39", RANGE),
            (StaticScale, {"scale": 2.0**-127}, f"scale={2.0**-127}", RANGE),
            (DynamicScale, {"init_scale": 0.0}, "init_scale=0.0", BOUNDS),
            (DynamicScale, {"init_scale": math.nan}, "init_scale=nan", BOUNDS),
            (DynamicScale, {"init_scale": 2.0**127}, f"init_scale={2.0**127}", BOUNDS),
            (DynamicScale, {"init_scale": 2.0**-25}, f"init_scale={2.0**-25}", BOUNDS),
            (DynamicScale, {"init_scale": 10**400}, f"init_scale={10**400}", BOUNDS),
            (
                DynamicScale,
                {"init_scale": 4.0, "min_scale": 8.0},
                "init_scale=4.0",
                "[8, 8.50706e+37]",
            ),
            (DynamicScale, {"min_scale": 0.0}, "min_scale=0.0", RANGE),
            (DynamicScale, {"max_scale": math.inf}, "max_scale=inf", RANGE),
        ]
    ],
)
def test_a_scale_that_is_no_usable_f32_is_refused(kind, settings, text):
    with pytest.raises(ConfigError) as error:
        kind(**settings)
    assert said(error) == text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"init_scale": "1024"}, "init_scale='1024' is a str"),
        ({"init_scale": None}, "init_scale=None is a NoneType"),
        ({"init_scale": True}, "init_scale=True is a bool"),
        ({"min_scale": "0"}, "min_scale='0' is a str"),
        ({"max_scale": 1j}, "max_scale=1j is a complex"),
        ({"growth_factor": "2"}, "growth_factor='2' is a str"),
        ({"growth_factor": Decimal("2")}, "growth_factor=Decimal('2') is a Decimal"),
        ({"backoff_factor": False}, "backoff_factor=False is a bool"),
        ({"tolerance": [0.1]}, "tolerance=[0.1] is a list"),
    ],
    ids=str,
)
def test_what_is_not_a_number_is_refused(settings, text):
    with pytest.raises(ConfigError) as error:
        DynamicScale(**settings)
    assert said(error) == (
        f"{text}. The rule computes with it, so it must be a number. Pass a float. "
        "[GS101]"
    )


def test_bounds_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError) as error:
        DynamicScale(min_scale=16.0, max_scale=8.0)
    assert said(error) == (
        "min_scale=16 is above max_scale=8. No scale can satisfy both. Swap them, or "
        "omit one. [GS101]"
    )


@pytest.mark.parametrize(
    "factor", [1.0, 0.5, 0.0, -2.0, 1.0 + 1e-9, 1e39, math.inf, math.nan]
)
def test_a_growth_factor_that_cannot_raise_the_scale_is_refused(factor):
    with pytest.raises(ConfigError) as error:
        DynamicScale(growth_factor=factor)
    assert said(error) == (
        f"growth_factor={factor} can never raise the scale. The scale is multiplied by "
        "it after growth_interval finite steps, so it must exceed 1 and be finite in "
        "f32. Pass 2.0, or use StaticScale to keep the scale fixed. [GS101]"
    )


@pytest.mark.parametrize(
    "factor", [1.0, 2.0, 0.0, -0.5, 1e-46, 1.0 - 2.0**-25, math.inf, math.nan]
)
def test_a_backoff_factor_that_cannot_lower_the_scale_is_refused(factor):
    with pytest.raises(ConfigError) as error:
        DynamicScale(backoff_factor=factor)
    assert said(error) == (
        f"backoff_factor={factor} can never lower the scale to a usable value. The "
        "scale is multiplied by it when a gradient is not finite, so it must be "
        "between 0 and 1. Pass 0.5, or use StaticScale to keep the scale fixed. [GS101]"
    )


@pytest.mark.parametrize(
    ("settings", "torch_says"),
    [
        ({"growth_factor": 1.0}, "The growth factor must be > 1.0."),
        ({"backoff_factor": 1.0}, "The backoff factor must be < 1.0."),
    ],
    ids=str,
)
def test_a_mistake_that_torch_knows_keeps_its_words(settings, torch_says):
    with pytest.raises(AssertionError) as error:
        DynamicScale(**settings)
    assert str(error.value).splitlines()[0] == torch_says


@pytest.mark.parametrize("interval", [2.0, "2000", None, True], ids=repr)
def test_an_interval_that_is_no_whole_number_is_refused(interval):
    with pytest.raises(ConfigError) as error:
        DynamicScale(growth_interval=interval)
    assert said(error) == (
        f"growth_interval={interval!r} is a {type(interval).__name__}. It counts "
        "steps, so it must be a whole number. Pass an int. [GS101]"
    )


@pytest.mark.parametrize("interval", [0, -1, 2**31])
def test_an_interval_out_of_range_is_refused(interval):
    with pytest.raises(ConfigError) as error:
        DynamicScale(growth_interval=interval)
    assert said(error) == (
        f"growth_interval={interval} is not a number of steps from 1 to 2^31 - 1. The "
        "scale grows on every growth_interval-th finite step in a row. Pass 2000, or "
        "use StaticScale to keep the scale fixed. [GS101]"
    )


@pytest.mark.parametrize("tolerance", [0.5, 1.0, -0.1, 2.0**-31, math.nan, math.inf])
def test_a_tolerance_out_of_range_is_refused(tolerance):
    with pytest.raises(ConfigError) as error:
        DynamicScale(tolerance=tolerance)
    assert said(error) == (
        f"tolerance={tolerance} is not a share of steps in [0, 0.5). It is the share "
        "of recent steps that may overflow before the scale backs off; at one half or "
        "more, a run could lose every second step and never recover. Pass 0.0 for the "
        "classic rule, or a small share such as 0.05. [GS101]"
    )


@pytest.mark.parametrize("scale", [LOWEST_SCALE, HIGHEST_SCALE])
def test_the_ends_of_the_range_are_accepted(scale):
    assert StaticScale(scale=scale).init_state() == FixedState(scale=scale)


# --- what a policy is -----------------------------------------------------------------


@given(POLICIES)
def test_a_policy_is_a_value(policy):
    twin = replace(policy)
    assert twin == policy
    assert hash(twin) == hash(policy)


@pytest.mark.parametrize(
    ("policy", "name"),
    [(DynamicScale(), "init_scale"), (StaticScale(scale=2.0), "scale")],
    ids=["dynamic", "static"],
)
def test_a_policy_cannot_be_changed(policy, name):
    with pytest.raises(FrozenInstanceError):
        setattr(policy, name, 1.0)


def test_settings_are_named():
    with pytest.raises(TypeError):
        DynamicScale(1024.0)


def test_the_defaults_are_those_of_torch():
    policy = DynamicScale()
    moves = (policy.growth_factor, policy.backoff_factor, policy.growth_interval)
    assert (policy.init_scale, *moves) == (2.0**16, 2.0, 0.5, 2000)


def test_scales_are_kept_as_the_f32_that_will_be_used():
    assert DynamicScale(init_scale=1000.1).init_scale == f32(1000.1)


@pytest.mark.parametrize("scale", [1024, Fraction(1024)], ids=repr)
def test_any_real_number_becomes_a_float(scale):
    assert repr(StaticScale(scale=scale)) == "StaticScale(scale=1024.0)"


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        (NoScale(), FixedState(1.0)),
        (StaticScale(scale=8.0), FixedState(8.0)),
        (DynamicScale(init_scale=8.0), ScaleState(8.0, 0, 0)),
    ],
    ids=["none", "static", "dynamic"],
)
def test_the_first_state_has_the_initial_scale_and_no_history(policy, first):
    assert policy.init_state() == first


@given(st.builds(NoScale) | st.builds(StaticScale, scale=st.just(0.25)), TRACES)
def test_a_fixed_scale_never_moves(policy, trace):
    assert set(run(policy, trace)) <= {policy.init_state()}


# --- the rule -------------------------------------------------------------------------


@given(POLICIES, TRACES)
def test_scale_stays_within_its_bounds(policy, trace):
    for state in run(policy, trace):
        assert policy.min_scale <= state.scale <= policy.max_scale


@given(dynamic_policies(), TRACES)
def test_counts_stay_within_their_bounds(policy, trace):
    for state in run(policy, trace):
        assert 0 <= state.finite_steps < policy.growth_interval
        assert 0 <= state.debt <= policy.period


@given(POLICIES, TRACES)
def test_every_scale_is_an_f32(policy, trace):
    scales = [state.scale for state in run(policy, trace)]
    assert scales == [f32(scale) for scale in scales]


@given(dynamic_policies(), TRACES)
def test_a_step_does_not_change_the_state_it_is_given(policy, trace):
    state = policy.init_state()
    run(policy, trace, state)
    assert state == policy.init_state()


@given(dynamic_policies().filter(lambda policy: policy.growth_interval < 2000))
def test_the_scale_grows_on_exactly_every_interval_th_finite_step(policy):
    steps = 3 * policy.growth_interval
    scales = [policy.init_scale, *(s.scale for s in run(policy, [True] * steps))]
    grew = [after > before for before, after in pairwise(scales)]
    due = [
        step % policy.growth_interval == 0
        and scales[step - 1] < policy.max_scale
        and f32(scales[step - 1] * policy.growth_factor) < math.inf
        for step in range(1, steps + 1)
    ]
    assert grew == due


@given(dynamic_policies(), TRACES)
def test_the_scale_never_falls_on_a_finite_step(policy, trace):
    scales = [policy.init_scale, *(s.scale for s in run(policy, trace))]
    for finite, before, after in zip(trace, scales, scales[1:], strict=False):
        assert not finite or after >= before


@given(dynamic_policies(tolerances=st.just(0.0)), TRACES)
def test_every_overflow_lowers_a_scale_that_is_above_its_floor(policy, trace):
    scales = [policy.init_scale, *(s.scale for s in run(policy, trace))]
    for finite, before, after in zip(trace, scales, scales[1:], strict=False):
        assert finite or after < before or before == policy.min_scale


@given(dynamic_policies(), TRACES)
def test_every_overflow_restarts_the_count(policy, trace):
    for finite, state in zip(trace, run(policy, trace), strict=True):
        assert finite or state.finite_steps == 0


def test_a_count_beyond_the_interval_grows_at_once():
    policy = DynamicScale(init_scale=8.0, growth_interval=2)
    assert run(policy, [True], ScaleState(8.0, 5, 0)) == [ScaleState(16.0, 0, 0)]


@pytest.mark.parametrize(
    "factor", [1.0 - 2.0**-24, 1.0 - 2.0**-24 - 1e-9, 0.9999999], ids=repr
)
def test_the_weakest_backoff_still_reaches_the_floor(factor):
    scale = f32(1.25)
    floor = f32(scale - 2.0**-20)
    policy = DynamicScale(init_scale=scale, min_scale=floor, backoff_factor=factor)
    assert run(policy, [False] * 20)[-1].scale == floor


@pytest.mark.parametrize("seed", range(10))
def test_a_million_random_steps_never_leave_the_bounds(seed):
    rng = random.Random(seed)
    where, steps = PYTHON.where, 0
    for _ in range(100):
        policy = any_policy(rng)
        low, high, state = policy.min_scale, policy.max_scale, policy.init_state()
        assert 0.0 < low <= high < math.inf
        step = policy.next_state
        for finite in flags(rng, 1000):
            state = step(state, FINITE if finite else NOT_FINITE, where)
            # False for NaN too.
            assert low <= state.scale <= high, (policy, state)
            steps += 1
    assert steps == 100_000


# --- tolerance ------------------------------------------------------------------------


def classic(policy, trace):
    """The rule without tolerance, written with branches."""
    scale, count, states = policy.init_scale, 0, []
    for finite in trace:
        count += 1
        if not finite:
            scale, count = f32(scale * policy.backoff_factor), 0
        elif count == policy.growth_interval:
            grown, count = f32(scale * policy.growth_factor), 0
            scale = scale if grown == math.inf else grown
        scale = min(max(scale, policy.min_scale), policy.max_scale)
        states.append(ScaleState(scale, count, 0))
    return states


@given(dynamic_policies(tolerances=st.just(0.0)), TRACES)
def test_without_tolerance_the_rule_is_the_classic_one_bit_for_bit(policy, trace):
    assert run(policy, trace) == classic(policy, trace)


@given(TOLERANCES, st.integers(2, 5000))
def test_alternating_overflows_take_the_scale_to_its_floor(tolerance, interval):
    policy = DynamicScale(tolerance=tolerance, growth_interval=interval)
    # 40 halvings from 2^16 to 2^-24, of which at most every second is forgiven.
    last = run(policy, [False, True] * 82)[-1]
    assert last.scale == policy.min_scale


@given(TOLERANCES)
def test_steps_that_are_never_finite_take_the_scale_to_its_floor(tolerance):
    policy = DynamicScale(tolerance=tolerance)
    assert run(policy, [False] * 62)[-1].scale == policy.min_scale


@given(TOLERANCES)
def test_a_period_is_never_shorter_than_the_tolerance_allows(tolerance):
    period = DynamicScale(tolerance=tolerance).period
    assert period >= 3
    assert 1.0 / tolerance <= period < 1.0 / tolerance + 1.0


@pytest.mark.parametrize(
    ("tolerance", "period"), [(0.0, 0), (0.05, 20), (0.25, 4), (0.4, 3), (0.49, 3)]
)
def test_a_tolerance_means_one_overflow_in_a_period(tolerance, period):
    assert DynamicScale(tolerance=tolerance).period == period


@given(TOLERANCES, st.integers(1, 5))
def test_one_overflow_in_every_period_is_forgiven(tolerance, times):
    policy = DynamicScale(tolerance=tolerance)
    trace = ([False] + [True] * (policy.period - 1)) * times + [False]
    assert {state.scale for state in run(policy, trace)} == {policy.init_scale}


@given(TOLERANCES)
def test_one_overflow_that_comes_a_step_too_early_is_not_forgiven(tolerance):
    policy = DynamicScale(tolerance=tolerance)
    trace = [False] + [True] * (policy.period - 2) + [False]
    assert run(policy, trace)[-1].scale == 0.5 * policy.init_scale


@given(TOLERANCES, TRACES)
def test_overflows_beyond_the_tolerance_back_off(tolerance, trace):
    # Powers of two only, and no bound within reach: the exponent counts the moves.
    policy = DynamicScale(
        tolerance=tolerance,
        growth_interval=10**6,
        init_scale=2.0**64,
        min_scale=2.0**-120,
    )
    overflows = trace.count(False)
    most_forgiven = math.ceil(len(trace) / policy.period)
    last = [policy.init_state(), *run(policy, trace)][-1]
    moves = round(math.log2(policy.init_scale / last.scale))
    assert overflows - most_forgiven <= moves <= max(overflows - 1, 0)


@given(dynamic_policies(tolerances=TOLERANCES), TRACES)
def test_an_overflow_is_forgiven_exactly_if_the_last_forgiven_is_a_period_ago(
    policy, trace
):
    forgiven, last = [], -math.inf
    for step, finite in enumerate(trace):
        forgiven.append(not finite and step - last >= policy.period)
        last = step if forgiven[-1] else last
    # A full bucket is the mark of an overflow that was forgiven.
    full = [state.debt == policy.period for state in run(policy, trace)]
    assert full == forgiven


@given(dynamic_policies(tolerances=TOLERANCES), TRACES)
def test_a_forgiven_overflow_leaves_the_scale_where_it_is(policy, trace):
    states = [policy.init_state(), *run(policy, trace)]
    for finite, before, after in zip(trace, states, states[1:], strict=False):
        if not finite and before.debt <= 1:
            assert after == ScaleState(before.scale, 0, policy.period)


@given(TOLERANCES | st.just(0.0), st.integers(-20, 15))
def test_a_scale_that_is_too_high_comes_down_to_one_that_fits(tolerance, highest):
    policy = DynamicScale(tolerance=tolerance)
    state = policy.init_state()
    # 36 halvings at most, each with at most one forgiven overflow before it.
    for _ in range(72):
        seen = FINITE if state.scale <= 2.0**highest else NOT_FINITE
        state = policy.next_state(state, seen, PYTHON.where)
    assert state.scale == 2.0**highest


# --- settings that nobody checked -----------------------------------------------------

REFUSED = {
    "min_scale": 0.0,
    "max_scale": math.inf,
    "growth_factor": 1,
    "growth_interval": 2.5,
    "backoff_factor": 1.0,
}


def test_without_settings_an_unchecked_policy_is_the_default_one():
    assert DynamicScale.unchecked() == DynamicScale()


@given(dynamic_policies())
def test_checked_settings_give_the_same_policy_unchecked(policy):
    assert DynamicScale.unchecked(**vars(policy)) == policy


@pytest.mark.parametrize("name", REFUSED)
def test_an_unchecked_policy_accepts_what_the_constructor_refuses(name):
    with pytest.raises(ConfigError):
        DynamicScale(**{name: REFUSED[name]})
    assert vars(DynamicScale.unchecked(**{name: REFUSED[name]}))[name] is REFUSED[name]


def test_an_unchecked_policy_moves_by_the_same_rule():
    policy = DynamicScale.unchecked(**REFUSED | {"growth_factor": 4})
    states = run(policy, [True] * 4, ScaleState(2.0, 0, 0))
    assert [state.scale for state in states] == [2.0, 2.0, 8.0, 8.0]


def test_an_unchecked_scale_of_zero_stays_zero():
    policy = DynamicScale.unchecked(min_scale=0.0, growth_interval=1)
    states = run(policy, [True, False], ScaleState(0.0, 0, 0))
    assert [state.scale for state in states] == [0.0, 0.0]


def test_a_setting_that_does_not_exist_is_refused_unchecked_too():
    with pytest.raises(TypeError, match="unexpected keyword argument 'factor'"):
        DynamicScale.unchecked(factor=2.0)


def test_an_unchecked_policy_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        DynamicScale.unchecked().min_scale = 0.0
