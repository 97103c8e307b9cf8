"""The states that carry a scale: how they are made, found and read."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given

import gradscale.jax.state
from gradscale import (
    ConfigError,
    DynamicScale,
    GradscaleWarning,
    NoScale,
    OrderError,
    ScaleCollapsed,
    StateError,
    StaticScale,
    Verdict,
)
from gradscale.core.policies import HIGHEST_SCALE
from gradscale.jax import (
    LastStep,
    LossScaledState,
    counts,
    current_scale,
    init,
    last,
    loss_scaled,
    raise_if_collapsed,
    scaled_value_and_grad,
)
from tests.strategies import POLICIES

NAN = float("nan")
PARAMS = {"w": jnp.ones(2), "b": jnp.ones(())}
GOOD = {"w": jnp.full(2, 8.0), "b": jnp.full((), -16.0)}
BAD = {"w": jnp.array([8.0, NAN]), "b": jnp.ones(())}


@functools.cache
def compiled(policy, max_norm=None):
    """Return the first state and a step that is traced once for all tests."""
    optimizer = loss_scaled(optax.sgd(0.1), policy, max_norm=max_norm)
    step = jax.jit(lambda g, s, v: optimizer.update(g, s, PARAMS, value=v)[1])
    return optimizer.init(PARAMS), step


def stepped(policy, steps):
    """Return the state after some steps."""
    state, step = compiled(policy)
    for grads in steps:
        state = step(grads, state, 1.0)
    return state


# init


@given(POLICIES.filter(lambda policy: policy.max_scale <= 2.0**126))
def test_the_first_state_is_the_policys_own(policy):
    state, plain = init(policy), policy.init_state()
    assert type(state) is type(plain)
    assert [value.item() for value in state] == list(plain)


def test_a_state_is_strongly_typed():
    kinds = [(value.dtype.name, value.weak_type) for value in init(DynamicScale())]
    assert kinds == [("float32", False), ("int32", False), ("int32", False)]


def test_a_state_is_f32_and_i32_where_f64_is_allowed():
    with jax.enable_x64(True):
        kinds = [value.dtype.name for value in init(DynamicScale())]
    assert kinds == ["float32", "int32", "int32"]


def test_every_field_of_a_state_is_a_buffer_of_its_own():
    state = loss_scaled(optax.adam(0.1), DynamicScale()).init(PARAMS)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize(
    "policy",
    [
        StaticScale(scale=2.0**127),
        DynamicScale(max_scale=2.0**127),
        DynamicScale(max_scale=HIGHEST_SCALE),
    ],
)
def test_a_scale_whose_inverse_is_subnormal_is_refused(policy):
    with pytest.raises(ConfigError) as caught:
        init(policy)
    text = str(caught.value)
    assert f"max_scale={policy.max_scale:g} is above" in text
    assert "2^126" in text
    assert "every gradient would become 0" in text
    assert "Pass a lower max_scale" in text
    assert text.endswith("[GS101]")


def test_loss_scaled_refuses_such_a_scale():
    with pytest.raises(ConfigError, match=r"max_scale=1\.70141e\+38"):
        loss_scaled(optax.sgd(0.1), StaticScale(scale=2.0**127))


@pytest.mark.parametrize("policy", [DynamicScale, 1024.0, None, "dynamic"], ids=repr)
@pytest.mark.parametrize("use", [init, functools.partial(loss_scaled, optax.sgd(0.1))])
def test_what_is_no_policy_is_refused(use, policy):
    with pytest.raises(ConfigError) as caught:
        use(policy)
    text = str(caught.value)
    assert f"policy={policy!r} is a {type(policy).__name__}." in text
    assert text.endswith(
        "Pass DynamicScale(), StaticScale(scale=...) or NoScale(). [GS101]"
    )


def test_the_highest_scale_of_all_is_accepted():
    assert float(init(StaticScale(scale=2.0**126)).scale) == 2.0**126


# current_scale and last


def test_the_scale_is_found_in_the_state():
    state = loss_scaled(optax.sgd(0.1), DynamicScale(init_scale=32.0)).init(PARAMS)
    assert float(current_scale(state)) == 32.0


def test_the_scale_is_found_in_dicts_lists_and_other_states():
    state = loss_scaled(optax.sgd(0.1), DynamicScale(init_scale=32.0)).init(PARAMS)
    nested = {"opt": [optax.EmptyState(), (state,)], "step": 3, "none": None}
    assert float(current_scale(nested)) == 32.0


def test_the_scale_is_that_of_the_next_loss():
    state = stepped(DynamicScale(init_scale=8.0), [BAD])
    assert float(current_scale(state)) == 4.0
    assert float(last(state).scale) == 8.0


def test_optax_finds_one_scale_by_name():
    state = stepped(DynamicScale(init_scale=8.0), [GOOD])
    assert float(optax.tree.get(state, "scale")) == 8.0


def test_optax_sets_the_scale_by_name():
    state = stepped(DynamicScale(init_scale=8.0), [GOOD])
    moved = optax.tree.set(state, scale=jnp.float32(4.0))
    assert float(current_scale(moved)) == 4.0


@pytest.mark.parametrize("read", [counts, current_scale, last, raise_if_collapsed])
@pytest.mark.parametrize(
    "tree", [{"scale": 8.0}, (), None, optax.sgd(0.1).init(PARAMS)]
)
def test_a_tree_without_a_state_is_refused(read, tree):
    with pytest.raises(StateError) as caught:
        read(tree)
    text = str(caught.value)
    assert f"There is no state of loss_scaled in this {type(tree).__name__}." in text
    assert "The scale lives in the state of the optimizer" in text
    assert "Pass the result of its init() or update()" in text
    assert "a checkpoint must be restored into such a state" in text
    assert text.endswith("[GS302]")


@pytest.mark.parametrize("read", [counts, current_scale, last, raise_if_collapsed])
def test_a_tree_with_two_states_is_refused(read):
    state = loss_scaled(optax.sgd(0.1), NoScale()).init(PARAMS)
    with pytest.raises(StateError) as caught:
        read([state, state])
    text = str(caught.value)
    assert "There are 2 states of loss_scaled in this list." in text
    assert "one loss cannot be multiplied by all of them" in text
    assert "Put a single loss_scaled around multi_transform or chain" in text
    assert text.endswith("[GS302]")


def test_an_nnx_optimizer_is_read_like_a_state():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    inner = loss_scaled(optax.sgd(0.1), DynamicScale(init_scale=32.0))
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    grads = jax.tree.map(lambda leaf: leaf * NAN, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    assert float(current_scale(optimizer)) == 16.0
    assert last(optimizer).verdict is Verdict.CALIBRATING
    assert int(last(optimizer.opt_state).step) == 1


def test_before_the_first_step_nothing_is_wrong():
    step = last(loss_scaled(optax.sgd(0.1), DynamicScale()).init(PARAMS))
    assert (int(step.step), bool(step.applied), bool(step.finite)) == (0, False, True)
    assert step.verdict is Verdict.OK


# LastStep


def test_the_last_step_shows_what_was_read():
    step = last(stepped(DynamicScale(init_scale=8.0), [GOOD]))
    assert isinstance(step, LastStep)
    assert (int(step.step), float(step.scale), float(step.amax)) == (1, 8.0, 16.0)
    # A root on a GPU is right to two ulps.
    assert float(step.grad_norm) == pytest.approx(math.sqrt(6.0), rel=2.0**-22)
    assert step.peaks.tolist() == [16.0, 8.0]
    assert bool(step.applied) & bool(step.finite) & bool(step.norm_finite)


def test_the_last_step_shows_a_skip():
    step = last(stepped(DynamicScale(init_scale=8.0), [GOOD, BAD]))
    assert (int(step.step), bool(step.applied), bool(step.finite)) == (2, False, False)
    assert step.verdict is Verdict.OVERFLOW


def test_the_dtypes_of_the_last_step_are_those_it_documents():
    step = last(stepped(DynamicScale(), [GOOD]))
    kinds = {name: value.dtype.name for name, value in step._asdict().items()}
    assert [name for name, kind in kinds.items() if kind == "int32"] == [
        "step",
        "floor_steps",
    ]
    assert [name for name, kind in kinds.items() if kind == "float32"] == [
        "scale",
        "amax",
        "grad_norm",
        "peaks",
    ]
    assert set(kinds.values()) == {"int32", "float32", "bool"}


def test_the_record_holds_plain_python_values():
    record = last(stepped(DynamicScale(init_scale=8.0), [GOOD, BAD])).record
    # What nobody knows is None.
    assert {type(value) for value in record} == {int, float, bool, str, type(None)}
    assert (record.step, record.scale, record.applied) == (2, 8.0, False)


def test_counts_say_what_became_of_all_steps():
    policy = DynamicScale(init_scale=0.5, min_scale=0.25)
    told = counts(stepped(policy, [GOOD, GOOD, BAD, BAD, BAD]))
    assert tuple(map(int, told)) == (2, 3, 0, 2)
    assert told._fields == ("applied", "skipped", "retried", "at_floor")


def test_an_ensemble_has_no_verdict_of_its_own():
    first, step = compiled(DynamicScale(init_scale=8.0))
    members = jax.tree.map(lambda good, bad: jnp.stack([good, bad]), GOOD, BAD)
    step = last(jax.vmap(step, in_axes=(0, None, None))(members, first, 1.0))
    with pytest.raises(StateError) as caught:
        step.verdict  # noqa: B018
    text = str(caught.value)
    assert "an ensemble of shape (2,)" in text
    assert "Each member has a verdict of its own" in text
    assert text.endswith("[GS302]")
    members = [jax.tree.map(lambda fact, n=n: fact[n], step) for n in range(2)]
    assert [str(member.verdict) for member in members] == ["ok", "calibrating"]


def test_the_last_step_can_be_read_under_jit():
    state = stepped(DynamicScale(init_scale=8.0), [GOOD])
    assert float(jax.jit(lambda state: last(state).amax)(state)) == 16.0


@pytest.mark.parametrize("read", ["verdict", "record"])
def test_a_verdict_under_jit_is_refused_with_the_remedy(read):
    state = stepped(DynamicScale(init_scale=8.0), [GOOD])
    with pytest.raises(OrderError, match="inside jit") as caught:
        jax.jit(lambda state: getattr(last(state), read))(state)
    text = str(caught.value)
    assert (
        "Return last(opt_state) from the compiled step and read its verdict on" in text
    )
    assert text.endswith("[GS102]")


def test_the_state_before_the_first_step_has_the_types_of_later_ones():
    optimizer = loss_scaled(optax.adam(0.1), DynamicScale(), max_norm=1.0)
    first = optimizer.init(PARAMS)
    later = jax.eval_shape(optimizer.update, GOOD, first, PARAMS)[1]
    kinds = [
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
        for state in (first, later)
    ]
    assert kinds[0] == kinds[1]
    assert isinstance(later, LossScaledState)


# Verdicts


def verdicts(policy, steps, **options):
    """Return the verdict of every step, each a pair of gradients and a loss."""
    state, step = compiled(policy, **options)
    told = []
    for grads, loss in steps:
        state = step(grads, state, loss)
        told.append(str(last(state).verdict))
    return told


def test_overflows_before_the_first_applied_step_are_calibration():
    steps = [(BAD, 1.0), (BAD, 1.0), (GOOD, 1.0), (BAD, 1.0)]
    told = verdicts(DynamicScale(), steps)
    assert told == ["calibrating", "calibrating", "ok", "overflow"]


def test_an_overflow_right_after_growth_is_probing():
    steps = [(GOOD, 1.0), (GOOD, 1.0), (BAD, 1.0), (BAD, 1.0)]
    told = verdicts(DynamicScale(growth_interval=2), steps)
    assert told == ["ok", "ok", "probing", "overflow"]


def test_a_loss_that_is_not_finite_is_told_from_a_scale_that_is_too_high():
    steps = [(GOOD, 1.0), (BAD, NAN), (BAD, 1.0), (BAD, float("inf"))]
    told = verdicts(DynamicScale(), steps)
    assert told == ["ok", "forward_nonfinite", "overflow", "forward_nonfinite"]


def test_three_skips_at_the_floor_are_a_collapse():
    policy = DynamicScale(init_scale=2.0, min_scale=1.0)
    told = verdicts(policy, [(GOOD, 1.0), *[(BAD, 1.0)] * 5])
    assert told == ["ok", "overflow", "overflow", "overflow", "collapse", "collapse"]


def test_an_applied_step_ends_a_collapse():
    policy = DynamicScale(init_scale=1.0, min_scale=1.0)
    told = verdicts(policy, [(BAD, 1.0)] * 3 + [(GOOD, 1.0), (BAD, 1.0)])
    assert told == ["calibrating", "calibrating", "collapse", "ok", "overflow"]


@pytest.mark.parametrize("policy", [NoScale(), StaticScale(scale=4.0)])
def test_a_scale_that_cannot_move_cannot_collapse(policy):
    told = verdicts(policy, [(GOOD, 1.0)] + [(BAD, 1.0)] * 4)
    assert told == ["ok"] + ["overflow"] * 4


HUGE = {"w": jnp.full(2, 3e38), "b": jnp.ones(())}


def test_a_norm_that_overflows_is_told_from_gradients_that_do():
    told = verdicts(NoScale(), [(GOOD, 1.0), (HUGE, 1.0), (BAD, 1.0)], max_norm=1.0)
    assert told == ["ok", "norm_overflow", "overflow"]


def test_a_norm_nobody_clips_by_may_overflow():
    assert verdicts(NoScale(), [(HUGE, 1.0)]) == ["ok"]


# raise_if_collapsed


def test_a_collapse_is_raised_with_its_figures():
    policy = DynamicScale(init_scale=0.5, min_scale=0.25)
    state = stepped(policy, [GOOD, BAD, BAD, BAD, BAD])
    with pytest.raises(ScaleCollapsed) as caught:
        raise_if_collapsed(state)
    text = str(caught.value)
    assert "fallen to its floor of 0.25" in text
    assert "3 steps in a row up to step 5" in text
    assert "A lower scale cannot help" in text
    assert "Check culprits(last(opt_state), params)" in text
    assert text.endswith("[GS202]")


@pytest.mark.parametrize("steps", [[], [GOOD], [BAD], [BAD, BAD, BAD]])
def test_nothing_is_raised_before_a_collapse(steps):
    raise_if_collapsed(stepped(DynamicScale(init_scale=0.5, min_scale=0.25), steps))


# Gradients of a loss that was not scaled


@pytest.fixture
def fresh_process(monkeypatch, scale_requested):
    monkeypatch.setattr(gradscale.jax.state, "_scale_requested", False)


def first_step(policy, differentiate, *, compiled):
    optimizer, params = loss_scaled(optax.sgd(0.1), policy), jnp.ones(2)

    def step(params, state):
        _, grads = differentiate(lambda w: (w**2).sum())(state, params)
        return optimizer.update(grads, state, params)

    return (jax.jit(step) if compiled else step)(params, optimizer.init(params))


def plain_value_and_grad(loss):
    return lambda state, params: jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_loss_that_was_not_scaled_are_reported_once(
    fresh_process, compiled
):
    with pytest.warns(
        GradscaleWarning, match=r"too small by that factor.*scaled_value_and.*GS114"
    ):
        first_step(DynamicScale(), plain_value_and_grad, compiled=compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_step(DynamicScale(), plain_value_and_grad, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_scaled_loss_are_not_reported(fresh_process, compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_step(DynamicScale(), scaled_value_and_grad, compiled=compiled)


def test_gradients_of_a_loss_multiplied_by_hand_are_not_reported(fresh_process):
    def by_hand(loss):
        def differentiated(state, params):
            return jax.value_and_grad(lambda w: loss(w) * current_scale(state))(params)

        return differentiated

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_step(DynamicScale(), by_hand, compiled=True)


def test_a_policy_that_does_not_scale_needs_no_scaled_loss(fresh_process):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_step(NoScale(), plain_value_and_grad, compiled=False)
