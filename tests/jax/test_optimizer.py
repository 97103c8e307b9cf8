"""`loss_scaled`: unscale, clip, step or skip, and the scale that moves."""

import functools
import inspect
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import ConfigError, DynamicScale, GradientError, NoScale, StaticScale
from gradscale.jax import LossScaledState, current_scale, last, loss_scaled

INF, NAN = float("inf"), float("nan")
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 4.0]]), "b": jnp.array([0.25, -1.0])}
GRADS = {"w": jnp.array([[3.0, 1.0], [-2.0, 0.5]]), "b": jnp.array([0.75, -0.1])}
MOMENTUM = optax.sgd(0.5, momentum=0.5)
# Compiled as a whole, sums are fused otherwise: two roundings in each of ten steps.
FUSED_TOLERANCE = 2.0**-19


def one(value):
    return jnp.full(1, value)


def scaled(grads, scale):
    return jax.tree.map(lambda grad: grad * scale, grads)


def step(optimizer, grads, params=None, **extra):
    """Return the updates and the state after the first update."""
    return optimizer.update(grads, optimizer.init(params), params, **extra)


def first_update(inner, policy, grads, params=None, **options):
    params = grads if params is None else params
    return step(loss_scaled(inner, policy, **options), grads, params)[0]


def bits(tree):
    """Return every leaf's dtype and bytes."""
    leaves = jax.tree.leaves(tree)
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in leaves]


# The interface of optax


def test_the_wrapper_is_a_transform_with_extra_arguments():
    optimizer = loss_scaled(optax.sgd(0.1), NoScale())
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    assert isinstance(optimizer.init(PARAMS), LossScaledState)


def test_the_third_argument_of_update_is_params():
    parameters = list(
        inspect.signature(loss_scaled(optax.sgd(0.1), NoScale()).update).parameters
    )
    assert parameters[2] == "params"


def test_params_may_be_passed_by_keyword():
    optimizer = loss_scaled(optax.adamw(0.1), NoScale())
    state = optimizer.init(PARAMS)
    by_name, _ = optimizer.update(GRADS, state, params=PARAMS)
    by_place, _ = optimizer.update(GRADS, state, PARAMS)
    assert bits(by_name) == bits(by_place)


def test_params_may_be_left_out_if_the_inner_optimizer_needs_none():
    optimizer = loss_scaled(optax.sgd(0.5), StaticScale(scale=8.0))
    updates, state = optimizer.update(one(16.0), optimizer.init(one(0.0)))
    assert updates.tolist() == [-1.0]
    assert last(state).applied


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        loss_scaled(optax.sgd(0.1), NoScale(), "axis")


# Applied steps


@settings(max_examples=25)
@given(st.integers(-60, 60))
def test_a_power_of_two_changes_no_bit_of_a_step(power):
    factor = 2.0**power
    updates = first_update(
        optax.adamw(0.1), StaticScale(scale=factor), scaled(GRADS, factor), PARAMS
    )
    inner = optax.adamw(0.1)
    true_updates, _ = inner.update(GRADS, inner.init(PARAMS), PARAMS)
    assert bits(updates) == bits(true_updates)


@functools.cache
def clipping(inner_name, wrapped):
    """Return a compiled step: `loss_scaled` or optax's own chain, clipped to 1."""
    inner = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(0.1)}[inner_name]
    if wrapped:
        policy = DynamicScale(max_scale=2.0**100)
        optimizer = loss_scaled(inner, policy, max_norm=1.0)
    else:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), inner)
    return optimizer.init(PARAMS), jax.jit(optimizer.update)


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@given(
    scale=st.floats(2.0**-20, 2.0**60, width=32),
    size=st.floats(2.0**-10, 2.0**10, width=32),
)
def test_clipping_equals_that_of_optax_whatever_the_scale(inner, scale, size):
    grads = scaled(GRADS, np.float32(size))
    state, update = clipping(inner, True)
    state = optax.tree.set(state, scale=jnp.float32(scale))
    updates, moved = update(scaled(grads, np.float32(scale)), state, PARAMS)
    first, true_update = clipping(inner, False)
    true_updates, _ = true_update(grads, first, PARAMS)
    assert moved.last.applied
    for name, update in updates.items():
        np.testing.assert_allclose(update, true_updates[name], rtol=FUSED_TOLERANCE)


@pytest.mark.parametrize("policy", [NoScale(), StaticScale(scale=2.0**10)])
def test_gradients_within_the_norm_are_not_clipped_by_a_bit(policy):
    grads = scaled(GRADS, 2.0**10 if policy != NoScale() else 1.0)
    free = first_update(optax.sgd(0.1), policy, grads)
    clipped = first_update(optax.sgd(0.1), policy, grads, max_norm=1e4)
    assert bits(free) == bits(clipped)


def test_a_norm_equal_to_max_norm_is_not_clipped():
    updates = first_update(
        optax.sgd(1.0), NoScale(), jnp.array([3.0, -4.0]), jnp.zeros(2), max_norm=5.0
    )
    assert updates.tolist() == [-3.0, 4.0]


def test_a_norm_above_max_norm_is_clipped_to_it():
    updates = first_update(
        optax.sgd(1.0),
        StaticScale(scale=8.0),
        jnp.array([24.0, -32.0]),
        jnp.zeros(2),
        max_norm=2.5,
    )
    assert updates.tolist() == [-1.5, 2.0]


def test_the_norm_that_is_shown_is_that_before_clipping():
    optimizer = loss_scaled(optax.sgd(1.0), StaticScale(scale=8.0), max_norm=2.5)
    _, state = step(optimizer, jnp.array([24.0, -32.0]), jnp.zeros(2))
    assert float(last(state).grad_norm) == 5.0


def test_zero_gradients_are_a_step_like_any_other():
    optimizer = loss_scaled(optax.sgd(1.0), DynamicScale(), max_norm=1.0)
    updates, state = step(optimizer, one(0.0), one(1.0))
    assert updates.tolist() == [0.0]
    assert last(state).applied


@pytest.mark.parametrize(
    "max_norm",
    [0.0, -1.0, INF, NAN, True, "1.0", 1e-46, 1e-40, 1e39, 1j, [1.0]],
    ids=str,
)
def test_what_is_no_norm_to_clip_to_is_refused(max_norm):
    with pytest.raises(ConfigError) as caught:
        loss_scaled(optax.sgd(0.1), NoScale(), max_norm=max_norm)
    text = str(caught.value)
    assert f"max_norm={max_norm!r} is not a norm to clip to." in text
    assert "it must be a positive, normal f32" in text
    assert "Pass 1.0, for instance, or None" in text
    assert text.endswith("[GS101]")


@pytest.mark.parametrize("max_norm", [1, 1.0, np.float32(1.0), np.float64(1.0)])
def test_any_real_number_is_a_norm_to_clip_to(max_norm):
    updates = first_update(
        optax.sgd(1.0), NoScale(), one(4.0), one(0.0), max_norm=max_norm
    )
    assert updates.tolist() == [-1.0]


# Dtypes


@pytest.mark.parametrize("params_dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("grads_dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("bad", [False, True], ids=["applied", "skipped"])
def test_any_mixture_of_half_and_full_works(params_dtype, grads_dtype, bad):
    optimizer = loss_scaled(MOMENTUM, StaticScale(scale=8.0), max_norm=100.0)
    params = jnp.ones(2, params_dtype)
    grads = jnp.array([8.0, INF if bad else -8.0], grads_dtype)
    before = optimizer.init(params)
    updates, after = optimizer.update(grads, before, params)
    assert updates.dtype == jnp.float32
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [
        leaf.dtype for leaf in jax.tree.leaves(before)
    ]
    moved = optax.apply_updates(params, updates)
    assert moved.dtype == params_dtype
    assert moved.tolist() == ([1.0, 1.0] if bad else [0.5, 1.5])


def test_gradients_in_fp8_are_unscaled_in_f32():
    grads = jnp.array([2.0**-9, 448.0], jnp.float8_e4m3fn)
    updates = first_update(
        optax.sgd(1.0), StaticScale(scale=2.0**20), grads, jnp.zeros(2)
    )
    assert updates.tolist() == [-(2.0**-29), -448.0 / 2.0**20]


def test_an_f16_gradient_survives_a_scale_that_f16_cannot_divide_by():
    grads = jnp.full(1, 2e-4, jnp.float16)
    updates = first_update(optax.sgd(1.0), StaticScale(scale=2.0**15), grads, one(0.0))
    assert float(updates[0]) == -float(grads[0]) / 2.0**15


def test_complex_parameters_are_stepped():
    updates = first_update(
        optax.sgd(1.0), StaticScale(scale=4.0), jnp.array([4.0 - 8.0j]), max_norm=10.0
    )
    assert updates.tolist() == [-1.0 + 2.0j]


def test_the_inner_optimizer_sees_half_parameters_in_f32():
    seen = []

    def update(updates, state, params=None):
        seen.append((updates.dtype, params.dtype))
        return updates, state

    inner = optax.GradientTransformation(lambda params: (), update)
    first_update(inner, NoScale(), jnp.ones(1, jnp.float16))
    assert seen == [(jnp.float32, jnp.float32)]


def test_integer_parameters_reach_the_inner_optimizer_as_they_are():
    params = {"w": one(1.0), "table": jnp.arange(2)}
    grads = {"w": one(8.0), "table": jnp.arange(2)}
    inner = optax.multi_transform(
        {"sgd": optax.sgd(1.0), "none": optax.set_to_zero()},
        {"w": "sgd", "table": "none"},
    )
    updates = first_update(
        inner,
        StaticScale(scale=8.0),
        grads,
        params,
        mask={"w": True, "table": False},
    )
    moved = optax.apply_updates(params, updates)
    assert (moved["w"].tolist(), moved["table"].tolist()) == ([0.0], [0, 1])
    assert moved["table"].dtype == jnp.int32


# Masks


def masked_update(grads, **options):
    optimizer = loss_scaled(
        optax.sgd(1.0),
        StaticScale(scale=8.0),
        mask={"amax": False, "w": True},
        **options,
    )
    return step(optimizer, grads, {"amax": one(0.0), "w": jnp.zeros(2)})


def test_a_masked_leaf_is_neither_unscaled_nor_clipped():
    grads = {"amax": one(100.0), "w": jnp.array([24.0, 32.0])}
    updates, state = masked_update(grads, max_norm=2.5)
    assert updates["amax"].tolist() == [-100.0]
    assert updates["w"].tolist() == [-1.5, -2.0]
    assert float(last(state).grad_norm) == 5.0


def test_a_bad_masked_leaf_skips_nothing():
    updates, state = masked_update({"amax": one(NAN), "w": jnp.full(2, 8.0)})
    assert last(state).applied
    assert math.isnan(updates["amax"][0])
    assert updates["w"].tolist() == [-1.0, -1.0]


def test_a_masked_leaf_gets_no_update_on_a_skip():
    updates, _ = masked_update({"amax": one(100.0), "w": jnp.array([1.0, INF])})
    assert updates["amax"].tolist() == [0.0]


@pytest.mark.parametrize(
    "mask", [lambda tree: {"a": False, "b": True}, {"a": False, "b": True}]
)
def test_a_mask_may_stand_for_all_below_it(mask):
    optimizer = loss_scaled(optax.sgd(1.0), NoScale(), mask=mask)
    params = {"a": [one(0.0), one(0.0)], "b": one(0.0)}
    grads = {"a": [one(NAN), one(INF)], "b": one(1.0)}
    assert last(step(optimizer, grads, params)[1]).applied


# Skips


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_bad_gradient_skips_the_step_and_backs_off(bad, max_norm):
    optimizer = loss_scaled(
        optax.sgd(1.0), DynamicScale(init_scale=8.0), max_norm=max_norm
    )
    updates, state = step(optimizer, jnp.array([1.0, bad]), jnp.ones(2))
    assert updates.tolist() == [0.0, 0.0]
    assert float(current_scale(state)) == 4.0


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_inner_optimizer_sees_zeros_instead_of_what_is_skipped(max_norm):
    seen = []

    def update(updates, state, params=None):
        seen.append(updates.tolist())
        return updates, state

    inner = optax.GradientTransformation(lambda params: (), update)
    first_update(inner, NoScale(), jnp.array([1.0, INF, NAN]), max_norm=max_norm)
    assert seen == [[0.0, 0.0, 0.0]]


def test_an_overflow_in_unscaling_skips_the_step():
    optimizer = loss_scaled(optax.sgd(1.0), StaticScale(scale=2.0**-113))
    updates, state = step(optimizer, jnp.full(1, 65504.0, jnp.float16), one(1.0))
    assert not last(state).applied
    assert updates.tolist() == [0.0]


def test_a_norm_that_overflows_skips_a_step_that_clips():
    optimizer = loss_scaled(optax.sgd(1.0), DynamicScale(init_scale=8.0), max_norm=1.0)
    updates, state = step(optimizer, jnp.full(2, 3e38), jnp.ones(2))
    updates, state = optimizer.update(jnp.full(2, 3e38), state, jnp.ones(2))
    assert (bool(last(state).finite), bool(last(state).norm_finite)) == (True, False)
    assert updates.tolist() == [0.0, 0.0]
    assert float(current_scale(state)) == 2.0


def test_steps_are_counted_by_what_became_of_them():
    optimizer = loss_scaled(optax.sgd(1.0), DynamicScale())
    state = optimizer.init(one(0.0))
    for value in (1.0, NAN, 1.0, 1.0, INF):
        _, state = optimizer.update(one(value), state)
    assert (int(state.applied_steps), int(state.skipped_steps)) == (3, 2)
    assert (int(last(state).step), int(state.retried_steps)) == (5, 0)


def test_the_scale_follows_the_policy_step_for_step():
    policy = DynamicScale(init_scale=8.0, growth_interval=2)
    optimizer = loss_scaled(optax.sgd(1.0), policy)
    state, scales = optimizer.init(one(0.0)), []
    for value in (1.0, 1.0, 1.0, NAN, 1.0, 1.0):
        _, state = optimizer.update(one(value), state)
        scales.append(float(current_scale(state)))
    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize("policy", [NoScale(), StaticScale(scale=4.0)])
def test_a_fixed_scale_skips_and_stays(policy):
    optimizer = loss_scaled(optax.sgd(1.0), policy)
    updates, state = step(optimizer, one(NAN), one(1.0))
    assert updates.tolist() == [0.0]
    assert float(current_scale(state)) == policy.max_scale


@functools.cache
def long_run(policy, values):
    """Return the scales and the last state of a run of one weight, in one graph."""
    optimizer = loss_scaled(optax.adam(0.1), policy, max_norm=1.0)

    def body(carry, value):
        params, state = carry
        grads = value * state.rule.scale * jnp.ones(1)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), state.rule.scale

    first = jnp.ones(1), optimizer.init(jnp.ones(1))
    (params, state), scales = jax.lax.scan(body, first, jnp.array(values))
    return params, state, np.asarray(scales)


def test_200_overflows_end_at_the_floor_and_the_next_step_is_taken():
    policy = DynamicScale(min_scale=2.0**-3)
    params, state, scales = long_run(policy, (1.0, *[INF] * 200, 1.0))
    assert scales.min() == 2.0**-3
    assert (int(state.applied_steps), int(state.skipped_steps)) == (2, 200)
    assert float(params[0]) == pytest.approx(0.8, rel=2.0**-18)


def test_200_growths_end_at_the_ceiling_and_the_step_is_taken():
    policy = DynamicScale(growth_interval=1)
    params, state, scales = long_run(policy, (1e-30,) * 202)
    assert np.isfinite(scales).all()
    assert scales[-1] == 2.0**126
    # At the ceiling these gradients are 8.5e7, far from an overflow.
    assert int(state.skipped_steps) == 0
    assert np.isfinite(params).all()


# The loss


@pytest.mark.parametrize(
    ("value", "finite"),
    [
        (jnp.float32(1.0), True),
        (jnp.float16(INF), False),
        (NAN, False),
        (1, True),
        (jnp.array([1.0, NAN]), False),
    ],
)
def test_the_loss_passed_as_value_is_looked_at(value, finite):
    optimizer = loss_scaled(optax.sgd(1.0), NoScale())
    _, state = step(optimizer, one(1.0), one(1.0), value=value)
    assert bool(last(state).loss_finite) is finite


def test_a_loss_nobody_passed_counts_as_finite():
    _, state = step(loss_scaled(optax.sgd(1.0), NoScale()), one(1.0), one(1.0))
    assert last(state).loss_finite


def test_a_bad_loss_with_finite_gradients_is_shown_and_not_skipped():
    optimizer = loss_scaled(optax.sgd(1.0), NoScale())
    updates, state = step(optimizer, one(1.0), one(1.0), value=NAN)
    assert str(last(state).verdict) == "forward_nonfinite"
    assert updates.tolist() == [-1.0]


def test_value_reaches_an_inner_optimizer_that_wants_it():
    optimizer = loss_scaled(optax.polyak_sgd(100.0), StaticScale(scale=8.0))
    updates, _ = step(optimizer, one(16.0), one(1.0), value=jnp.float32(6.0))
    # The step of Polyak: the loss over the squared norm, times the gradient 2.
    assert updates.tolist() == [-3.0]


def test_extra_arguments_nobody_wants_do_no_harm():
    optimizer = loss_scaled(optax.sgd(1.0), NoScale())
    updates, _ = step(optimizer, one(1.0), one(1.0), value=1.0, anything="text")
    assert updates.tolist() == [-1.0]


# Trees


def test_none_stands_for_what_is_not_trained():
    params = {"w": one(1.0), "frozen": None}
    optimizer = loss_scaled(MOMENTUM, StaticScale(scale=8.0), max_norm=9.0)
    updates, _ = step(optimizer, {"w": one(8.0), "frozen": None}, params)
    moved = optax.apply_updates(params, updates)
    assert moved["frozen"] is None
    assert moved["w"].tolist() == [0.5]


@pytest.mark.parametrize(
    "params",
    [one(1.0), [one(1.0)], (one(1.0), {"a": one(1.0)}), {"a": {"b": one(1.0)}}],
)
def test_updates_have_the_structure_of_the_gradients(params):
    updates = first_update(optax.adam(0.1), NoScale(), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize(
    ("number", "compiled"), [(300, False), (100, True)], ids=["eager", "compiled"]
)
def test_hundreds_of_leaves_are_all_stepped_and_all_checked(number, compiled):
    params = [jnp.full(2, float(n)) for n in range(number)]
    optimizer = loss_scaled(optax.sgd(1.0), StaticScale(scale=8.0), max_norm=1e6)
    # Facts joined anew for each update: 100 leaves took half a minute to compile.
    update = jax.jit(optimizer.update) if compiled else optimizer.update
    state = optimizer.init(params)
    updates, state = update(scaled(params, 8.0), state, params)
    assert [float(leaf[1]) for leaf in updates] == [-float(n) for n in range(number)]
    params[57] = jnp.array([NAN, 1.0])
    updates, state = update(params, state, params)
    assert not last(state).applied
    assert np.flatnonzero(np.isnan(last(state).peaks)).tolist() == [57]
    assert not np.any(updates)


def test_a_missing_gradient_is_named():
    optimizer = loss_scaled(optax.sgd(1.0), NoScale())
    params = {"a": one(1.0), "b": one(1.0)}
    with pytest.raises(GradientError, match=r"b has no gradient.*GS106"):
        step(optimizer, {"a": one(1.0), "b": None}, params)


def test_gradients_of_another_tree_are_refused_though_no_params_are_passed():
    optimizer = loss_scaled(optax.sgd(1.0), NoScale())
    state = optimizer.init({"a": one(1.0)})
    with pytest.raises(GradientError) as caught:
        optimizer.update({"a": one(1.0), "b": one(1.0)}, state)
    text = str(caught.value)
    assert "There are 2 gradients, and init() was given 1 parameters." in text
    assert "pair the wrong arrays" in text
    assert "Pass the gradients of the tree that init() was called with" in text
    assert text.endswith("[GS106]")


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"a": jnp.arange(2)}, r"The gradient of a is int32.*GS106"),
        ({"a": np.zeros(2, jax.dtypes.float0)}, r"The gradient of a is float0.*GS106"),
        ({"a": None}, r"There is no gradient in \{'a': None\}.*GS103"),
    ],
    ids=["integer", "float0", "None"],
)
def test_what_is_no_gradient_is_refused(grads, words):
    optimizer = loss_scaled(optax.sgd(1.0), NoScale())
    with pytest.raises(GradientError, match=words):
        step(optimizer, grads, {"a": jnp.ones(2)})


# A search for a bad value that reaches a weight

SEARCHED = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.1),
    "lion": lambda: optax.lion(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.1),
}


HALF_GRADS = ("f32", "f16", 1.0)
ALL_F16 = ("f16", "f16", None)
ALL_BF16 = ("bf16", "bf16", 1.0)
DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, HALF_GRADS) for name in SEARCHED),
        ("sgd", ALL_F16),
        ("adamw", ALL_F16),
        ("adamw", ALL_BF16),
        ("adafactor", ALL_BF16),
    ],
    ids=str,
)
def test_no_bad_value_ever_reaches_a_weight(name, kinds):
    params_kind, grads_kind, max_norm = kinds
    # Sixteen standard deviations fit into f16 at the highest scale.
    policy = DynamicScale(init_scale=2.0**10, growth_interval=3, max_scale=2.0**12)
    optimizer = loss_scaled(SEARCHED[name](), policy, max_norm=max_norm)

    @jax.jit
    def train(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda leaf: leaf.astype(DTYPES[params_kind]), PARAMS)
    state = optimizer.init(params)
    # Of its own: pytest-randomly seeds the global one anew in every run.
    dice = random.Random(f"{name} {kinds}")
    for _ in range(40):
        scale = float(current_scale(state))
        grads = {
            key: np.array([dice.gauss(0.0, scale) for _ in range(leaf.size)])
            for key, leaf in params.items()
        }
        bad = dice.random() < 0.5
        if bad:
            leaf = grads[dice.choice(["w", "b"])]
            leaf[dice.randrange(leaf.size)] = dice.choice([INF, -INF, NAN])
        before, inner = params, state.inner
        shaped = {
            key: jnp.asarray(grads[key].reshape(leaf.shape), DTYPES[grads_kind])
            for key, leaf in params.items()
        }
        params, state = train(params, state, shaped)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.inner))
        assert bool(last(state).applied) is not bad
        assert not bad or bits((params, state.inner)) == bits((before, inner))
    assert int(last(state).step) == 40
