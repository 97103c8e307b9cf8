"""The licence of the two-operation rule: it moves as the core's rule does."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import PYTHON, DynamicScale, NoScale, Observed, ScaleState, StaticScale
from gradscale.core.policies import HIGHEST_SCALE
from gradscale.torch.device_state.rule import move_, moves_as_torch

POWERS = st.integers(-126, 127).map(lambda power: 2.0**power)


@st.composite
def policies(draw):
    low, first, high = sorted(draw(st.tuples(POWERS, POWERS, POWERS)))
    return DynamicScale(
        init_scale=first,
        min_scale=low,
        max_scale=high,
        growth_factor=draw(st.sampled_from([2.0, 4.0, 2.0**30])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 2.0**-30])),
        growth_interval=draw(st.integers(1, 5)),
    )


def on_tensors(state):
    return ScaleState(
        torch.tensor(state.scale),
        torch.tensor(state.finite_steps, dtype=torch.int32),
        torch.tensor(state.debt, dtype=torch.int32),
    )


def walk(policy, flags):
    """Return the states of both statements of the rule after each step."""
    plain, fast, pairs = policy.init_state(), on_tensors(policy.init_state()), []
    for finite in flags:
        plain = policy.next_state(plain, Observed(finite, 1.0, True), PYTHON.where)
        move_(policy, fast, torch.tensor(float(not finite)))
        pairs.append((plain, ScaleState(*(value.item() for value in fast))))
    return pairs


@given(policies().filter(moves_as_torch), st.lists(st.booleans(), max_size=40))
@settings(deadline=None)
def test_the_fast_rule_is_the_rule_bit_for_bit(policy, flags):
    for plain, fast in walk(policy, flags):
        assert fast == plain


@given(
    st.floats(1.0001, 10.0),
    st.floats(0.01, 0.9999),
    st.lists(st.booleans(), max_size=9),
)
@settings(deadline=None)
def test_other_factors_move_within_one_ulp(growth, backoff, flags):
    policy = DynamicScale(
        growth_factor=growth, backoff_factor=backoff, growth_interval=2
    )
    for moves, (plain, fast) in enumerate(walk(policy, flags), start=1):
        assert abs(fast.scale - plain.scale) <= moves * plain.scale * 2.0**-23
        assert fast[1:] == plain[1:]


def test_a_product_that_leaves_f32_is_left_to_the_core():
    assert moves_as_torch(DynamicScale())
    assert not moves_as_torch(DynamicScale(max_scale=HIGHEST_SCALE))


def test_a_tolerance_and_a_fixed_scale_are_left_to_the_core():
    assert not moves_as_torch(DynamicScale(tolerance=0.1))
    assert not moves_as_torch(StaticScale(scale=2.0))
    assert not moves_as_torch(NoScale())
