"""The drop-in for jmp: the same scales as jmp, and none of its defects."""

import copy
import inspect
import math
import pickle
import random

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from gradscale import ConfigError, GradscaleWarning
from gradscale.jax import jmp as ours
from tests.strategies import flags

TRUE, FALSE = jnp.bool_(True), jnp.bool_(False)
LOWEST, HIGHEST = 2.0**-126, 2.0**126


def adjusted(loss_scale, trace):
    """Return the loss scale after a trace of finite flags."""
    for finite in trace:
        loss_scale = loss_scale.adjust(jnp.bool_(finite))
    return loss_scale


def values(loss_scale):
    return float(loss_scale.loss_scale), int(loss_scale.counter)


# --- the same interface ---------------------------------------------------------------


@pytest.mark.parametrize("name", jmp.__all__)
def test_a_public_name_of_jmp_is_there(name):
    assert name in ours.__all__
    assert hasattr(ours, name)


@pytest.mark.parametrize("name", sorted(set(jmp.__all__) - {"LossScale"}))
def test_a_public_name_takes_the_arguments_that_jmps_takes(name):
    mine, theirs = getattr(ours, name), getattr(jmp, name)
    assert list(inspect.signature(mine).parameters) == list(
        inspect.signature(theirs).parameters
    )


@pytest.mark.parametrize(
    "kind", [jmp.StaticLossScale, jmp.DynamicLossScale, jmp.Policy]
)
def test_a_class_has_the_public_attributes_that_jmps_has(kind):
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert public <= set(dir(getattr(ours, kind.__name__)))


@pytest.mark.parametrize(
    "kind", [ours.NoOpLossScale(), ours.StaticLossScale(2), ours.DynamicLossScale(2.0)]
)
def test_every_kind_is_a_loss_scale(kind):
    assert isinstance(kind, ours.LossScale)


# --- the same scales ------------------------------------------------------------------


def settings(rng, factor):
    """Return any settings with which jmp stays between 2^-126 and 2^126."""
    return {
        "loss_scale": jnp.float32(2.0 ** rng.uniform(-20.0, 40.0)),
        "counter": jnp.int32(0),
        "period": rng.choice((1, 2, 3, 7)),
        "factor": factor,
        "min_loss_scale": jnp.float32(rng.choice((0.0, 0.37, 1.0, 2.0**14))),
    }


def history(loss_scale, step, trace):
    told = []
    for finite in trace:
        loss_scale = step(loss_scale, jnp.bool_(finite))
        told.append(values(loss_scale))
    return told


def eager(loss_scale, finite):
    return loss_scale.adjust(finite)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("step", [eager, jax.jit(eager)], ids=["eager", "jit"])
def test_scales_and_counts_are_those_of_jmp_bit_for_bit(step, seed):
    rng = random.Random(seed)
    given, trace = settings(rng, rng.choice((2, 2.0))), flags(rng, 40)
    theirs = history(jmp.DynamicLossScale(**given), eager, trace)
    assert history(ours.DynamicLossScale(**given), step, trace) == theirs


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_move_by_three_is_that_of_jmp_to_one_ulp(seed, finite):
    given = settings(random.Random(seed), factor=3) | {"period": 1}
    theirs = jmp.DynamicLossScale(**given).adjust(jnp.bool_(finite)).loss_scale
    mine = ours.DynamicLossScale(**given).adjust(jnp.bool_(finite)).loss_scale
    assert abs(float(mine) - float(theirs)) <= np.spacing(np.float32(theirs))


@pytest.mark.parametrize("scale", [2.0**15, 3.0, 0.1])
@pytest.mark.parametrize("name", ["scale", "unscale"])
def test_trees_are_scaled_as_by_jmp(name, scale):
    tree = {"w": jnp.linspace(-3.0, 3.0, 7), "h": jnp.ones(2, jnp.bfloat16)}
    mine = getattr(ours.DynamicLossScale(jnp.float32(scale)), name)(tree)
    theirs = getattr(jmp.DynamicLossScale(jnp.float32(scale)), name)(tree)
    assert jax.tree.map(lambda a: (a.dtype, a.tolist()), mine) == jax.tree.map(
        lambda a: (a.dtype, a.tolist()), theirs
    )


@pytest.mark.parametrize("scale", [0.0, -8.0, math.nan])
@pytest.mark.parametrize("finite", [True, False])
def test_a_scale_that_makes_no_sense_moves_as_in_jmp(scale, finite):
    given = {"loss_scale": jnp.float32(scale), "period": 1}
    mine = ours.DynamicLossScale(**given).adjust(jnp.bool_(finite))
    theirs = jmp.DynamicLossScale(**given).adjust(jnp.bool_(finite))
    np.testing.assert_array_equal(mine.loss_scale, theirs.loss_scale)


def test_a_scale_below_its_floor_is_lifted_only_by_backing_off():
    loss_scale = ours.DynamicLossScale(1.0, period=2, min_loss_scale=64.0)
    told = [values(adjusted(loss_scale, [True] * n))[0] for n in range(4)]
    assert told == [1.0, 1.0, 2.0, 2.0]
    assert values(adjusted(loss_scale, [False])) == (64.0, 0)


# --- jmp's defects --------------------------------------------------------------------

DEFECTS = []


def jmp_fails(error, words):
    """Enter a scenario and the way in which jmp fails it."""

    def enter(scenario):
        name = scenario.__name__.replace("_", " ")
        DEFECTS.append(pytest.param(scenario, error, words, id=name))
        return scenario

    return enter


@jmp_fails(AssertionError, "the floor is lost")
def the_floor_holds_under_jit(library):
    first = library.DynamicLossScale(jnp.float32(0.25), min_loss_scale=jnp.float32(0.1))
    scale = jax.jit(eager)(first, FALSE).loss_scale
    assert scale == 0.125, "the floor is lost"


@jmp_fails(TypeError, "lax.select requires arguments to have the same dtypes")
def the_call_of_the_readme_can_be_adjusted(library):
    loss_scale = library.DynamicLossScale(library.half_dtype()(2**15))
    assert loss_scale.adjust(FALSE).loss_scale == 2.0**14


@jmp_fails(AssertionError, "the gradient underflowed")
def a_python_float_keeps_small_gradients(library):
    grads = library.DynamicLossScale(2.0**15).unscale(jnp.float16(2e-4))
    assert grads > 0.0, "the gradient underflowed"


@jmp_fails(AssertionError, "the gradient underflowed")
def a_static_python_float_keeps_small_gradients(library):
    grads = library.StaticLossScale(2.0**15).unscale(jnp.float16(2e-4))
    assert grads > 0.0, "the gradient underflowed"


@jmp_fails(AttributeError, "'bool' object has no attribute 'ndim'")
def a_python_bool_is_a_flag(library):
    assert library.DynamicLossScale(8.0, period=1).adjust(True).loss_scale == 16.0


@jmp_fails(TypeError, "lax.select requires arguments to have the same dtypes")
def the_two_sides_of_a_selection_may_differ_in_dtype(library):
    chosen = library.select_tree(TRUE, jnp.float16(1.0), jnp.float32(2.0))
    assert (chosen.dtype, float(chosen)) == (jnp.float32, 1.0)


@jmp_fails(AttributeError, "'bool' object has no attribute 'ndim'")
def a_python_bool_selects(library):
    assert library.select_tree(False, jnp.float32(1.0), jnp.float32(2.0)) == 2.0


@jmp_fails(AssertionError, "the scale is 0")
def repeated_halving_never_gives_zero(library):
    first = library.DynamicLossScale(jnp.float32(1.0), min_loss_scale=jnp.float32(0.0))
    assert adjusted(first, [False] * 130).loss_scale > 0.0, "the scale is 0"


@jmp_fails(AssertionError, "the gradient is 0")
def repeated_growth_never_loses_a_gradient(library):
    loss_scale = adjusted(library.DynamicLossScale(2.0**120, period=1), [True] * 10)
    assert loss_scale.unscale(loss_scale.scale(1.0)) == 1.0, "the gradient is 0"


@jmp_fails(AssertionError, "traced twice")
def a_run_is_traced_once(library):
    traced = []

    @jax.jit
    def step(loss_scale):
        traced.append(1)
        return loss_scale.adjust(TRUE)

    loss_scale = library.DynamicLossScale(2.0**15)
    for _ in range(3):
        loss_scale = step(loss_scale)
    assert len(traced) == 1, "traced twice"


FLUSHED = (repeated_halving_never_gives_zero, repeated_growth_never_loses_a_gradient)


@pytest.mark.parametrize(("scenario", "error", "words"), DEFECTS)
def test_jmp_has_the_defect(scenario, error, words):
    if scenario in FLUSHED and jax.default_backend() != "cpu":
        pytest.skip("XLA flushes subnormals on the CPU only")
    with pytest.raises(error, match=words):
        scenario(jmp)


@pytest.mark.parametrize(("scenario", "error", "words"), DEFECTS)
def test_the_drop_in_does_not_have_the_defect(scenario, error, words):
    scenario(ours)


# --- bounds ---------------------------------------------------------------------------


def test_halving_ends_at_the_smallest_normal_f32():
    first = ours.DynamicLossScale(1.0, min_loss_scale=0.0)
    assert values(adjusted(first, [False] * 126)) == (LOWEST, 0)
    assert values(adjusted(first, [False] * 200)) == (LOWEST, 0)


def test_a_run_recovers_from_the_smallest_scale():
    first = ours.DynamicLossScale(LOWEST, period=2, min_loss_scale=0.0)
    assert values(adjusted(first, [False, True, True, True])) == (2.0 * LOWEST, 1)


def test_growth_ends_where_the_inverse_is_still_normal():
    first = ours.DynamicLossScale(2.0**120, period=1)
    assert values(adjusted(first, [True] * 200)) == (HIGHEST, 0)


def test_a_scale_that_was_given_as_zero_stays_zero_under_a_floor_of_zero():
    first = ours.DynamicLossScale(0.0, period=1, min_loss_scale=0.0)
    assert values(adjusted(first, [True, False])) == (0.0, 0)


# --- what is accepted -----------------------------------------------------------------


@pytest.mark.parametrize(
    "scale",
    [8.0, np.float64(8.0), np.float32(8.0), jnp.float16(8.0), jnp.bfloat16(8.0)],
    ids=lambda scale: type(scale).__name__,
)
def test_a_scale_becomes_a_strong_f32(scale):
    loss_scale = ours.DynamicLossScale(scale).loss_scale
    assert (loss_scale.dtype, loss_scale.weak_type) == (jnp.float32, False)


def test_a_wider_scale_stays_wide():
    with jax.enable_x64(True):
        first = ours.DynamicLossScale(jnp.float64(0.1), period=1)
        assert first.loss_scale.dtype == jnp.float64
        assert first.adjust(True).loss_scale == 2.0 * 0.1


@pytest.mark.parametrize(
    "counter", [3, np.int64(3), np.uint8(3), jnp.float32(3.0)], ids=repr
)
def test_a_counter_becomes_a_strong_i32(counter):
    kept = ours.DynamicLossScale(8.0, counter).counter
    assert (kept.dtype, kept.weak_type, int(kept)) == (jnp.int32, False, 3)


@pytest.mark.parametrize("period", [3, 3.0, np.int64(3), jnp.int32(3)], ids=repr)
@pytest.mark.parametrize("factor", [4, 4.0, np.float32(4.0), jnp.int32(4)], ids=repr)
def test_period_and_factor_may_be_any_number(period, factor):
    first = ours.DynamicLossScale(8.0, 0, period, factor)
    assert values(jax.jit(eager)(adjusted(first, [True] * 2), TRUE)) == (32.0, 0)
    assert values(jax.jit(eager)(first, FALSE)) == (2.0, 0)


def test_a_factor_of_one_never_moves_the_scale():
    first = ours.DynamicLossScale(8.0, period=1, factor=1)
    assert values(adjusted(first, [True, False])) == (8.0, 0)


@pytest.mark.parametrize("flag", [False, np.bool_(False), FALSE, np.int32(0)], ids=repr)
def test_a_flag_may_be_whatever_has_a_truth_value(flag):
    assert values(ours.DynamicLossScale(8.0).adjust(flag)) == (4.0, 0)


@pytest.mark.parametrize(
    ("flag", "shown"),
    [(jnp.ones(1, bool), "bool[1]"), (jnp.float32(1.0), "float32[]")],
    ids=["not a scalar", "not a truth value"],
)
def test_a_flag_that_cannot_decide_is_refused(flag, shown):
    with pytest.raises(AssertionError, match="Expected boolean scalar") as error:
        ours.DynamicLossScale(8.0).adjust(flag)
    assert str(error.value).splitlines()[-1] == (
        f"The flag is {shown}. One flag decides for all leaves, so it must be one "
        "truth value. Pass the result of all_finite(). [GS101]"
    )


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("loss_scale", {"loss_scale": 1024}),
        ("loss_scale", {"loss_scale": jnp.int32(1024)}),
        ("min_loss_scale", {"loss_scale": 1024.0, "min_loss_scale": 1}),
    ],
    ids=["int", "i32", "floor"],
)
def test_an_integer_is_warned_about_once_and_taken_as_a_float(name, given):
    with pytest.warns(GradscaleWarning) as warned:
        loss_scale = ours.DynamicLossScale(**given)
    assert [str(each.message) for each in warned] == [
        f"Expected floating type for {name}, got int32. It is taken as a float. Pass "
        "a float. [GS101]"
    ]
    assert warned[0].filename == __file__
    assert values(loss_scale.adjust(False)) == (512.0, 0)


@pytest.mark.parametrize("scale", [0, 1024, 0.5, np.float32(3.0), jnp.float32(3.0)])
def test_a_static_scale_is_a_tree_without_leaves(scale):
    loss_scale = ours.StaticLossScale(scale)
    assert jax.tree.leaves(loss_scale) == []
    assert loss_scale.adjust(False) is loss_scale
    assert jax.jit(lambda kept, x: kept.scale(x))(loss_scale, 2.0) == 2.0 * scale


def test_no_scale_is_a_tree_without_leaves():
    loss_scale, tree = ours.NoOpLossScale(), {"w": jnp.ones(2)}
    assert jax.tree.leaves(loss_scale) == []
    assert loss_scale.loss_scale == 1
    assert loss_scale.adjust(False).unscale(loss_scale.scale(tree)) is tree


# --- leaves and structure -------------------------------------------------------------

KEPT = {"period": 3, "factor": 2, "min_loss_scale": 0.125}
WAYS = {
    "jit": jax.jit(lambda loss_scale: loss_scale),
    "tree.map": lambda loss_scale: jax.tree.map(lambda leaf: leaf + 0, loss_scale),
    "donation": jax.jit(
        lambda loss_scale: jax.tree.map(lambda leaf: leaf + 0, loss_scale),
        donate_argnums=0,
    ),
    "scan": lambda loss_scale: jax.lax.scan(
        lambda carried, _: (carried.adjust(TRUE), None), loss_scale, length=3
    )[0].adjust(FALSE),
    "cond": lambda loss_scale: jax.lax.cond(
        TRUE, lambda kept: kept, lambda kept: kept.adjust(FALSE), loss_scale
    ),
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss_scale: pickle.loads(pickle.dumps(loss_scale)),
    "device_get": jax.device_get,
}


@pytest.mark.parametrize("floor", [0.125, np.float32(0.125), jnp.float32(0.125)])
@pytest.mark.parametrize("way", WAYS)
def test_everything_survives(way, floor):
    first = ours.DynamicLossScale(8.0, **KEPT | {"min_loss_scale": floor})
    kept = WAYS[way](first)
    assert {name: getattr(kept, name) for name in KEPT} == KEPT
    assert values(kept) == (8.0, 0)
    assert values(adjusted(kept, [False] * 10)) == (0.125, 0)


def test_the_leaves_are_the_scale_and_the_counter():
    scale, counter = jnp.float32(8.0), jnp.int32(1)
    loss_scale = ours.DynamicLossScale(scale, counter, **KEPT)
    assert jax.tree.leaves(loss_scale) == [scale, counter]


def test_the_structure_can_be_hashed():
    first = ours.DynamicLossScale(8.0, min_loss_scale=jnp.float32(0.125))
    _, structure = first.tree_flatten()
    assert hash(structure) == hash((2000, 2, 0.125))
    assert hash(jax.tree.structure(first)) == hash(
        jax.tree.structure(first.adjust(True))
    )


@pytest.mark.parametrize(
    "placeholder", [object(), None, 0, "name"], ids=["object", "None", "0", "name"]
)
def test_the_leaves_may_be_whatever_jax_puts_there(placeholder):
    structure = jax.tree.structure(ours.DynamicLossScale(8.0))
    filled = jax.tree.unflatten(structure, [placeholder] * 2)
    assert (filled.loss_scale, filled.counter) == (placeholder, placeholder)


def test_two_loss_scales_are_equal_if_all_they_hold_is():
    loss_scale = ours.DynamicLossScale(8.0, **KEPT)
    assert loss_scale == ours.DynamicLossScale(jnp.float32(8.0), **KEPT)
    assert loss_scale != ours.DynamicLossScale(4.0, **KEPT)
    assert loss_scale != ours.DynamicLossScale(8.0, **KEPT | {"min_loss_scale": 1.0})


@pytest.mark.parametrize(
    "leaf", [float, np.float32, np.asarray], ids=lambda f: f.__name__
)
def test_leaves_that_became_plain_numbers_work_as_before(leaf):
    first = jax.tree.map(leaf, ours.DynamicLossScale(2.0**15, period=1))
    assert first.unscale(jnp.float16(2e-4)) > 0.0
    after = first.adjust(True)
    assert values(after) == (2.0**16, 0)
    assert [leaf.weak_type for leaf in jax.tree.leaves(after)] == [False, False]


def test_a_traced_floor_works_where_it_is_traced():
    @jax.jit
    def last(floor):
        first = ours.DynamicLossScale(8.0, min_loss_scale=floor)
        return first.adjust(False).adjust(False).loss_scale

    assert last(3.0) == 3.0


def test_a_traced_floor_cannot_leave():
    def build(floor):
        return ours.DynamicLossScale(8.0, min_loss_scale=floor)

    with pytest.raises(ConfigError, match=r"is a traced value.*Pass a Python float"):
        jax.jit(build)(3.0)


# --- under jax's transformations ------------------------------------------------------


def test_a_run_with_donation_is_traced_once():
    traced = []

    def step(loss_scale, grads):
        traced.append(1)
        grads = loss_scale.unscale(grads)
        return loss_scale.adjust(ours.all_finite(grads)), grads

    step = jax.jit(step, donate_argnums=0)
    loss_scale = ours.DynamicLossScale(2.0**15, period=2)
    told = []
    for grads in (1.0, 1.0, math.inf, 1.0, 1.0):
        loss_scale, _ = step(loss_scale, jnp.float16(grads))
        told.append(values(loss_scale))
    assert told == [
        (2.0**15, 1),
        (2.0**16, 0),
        (2.0**15, 0),
        (2.0**15, 1),
        (2.0**16, 0),
    ]
    assert len(traced) == 1


def test_two_loss_scales_do_not_share_what_is_donated():
    step = jax.jit(eager, donate_argnums=0)
    first, second = (ours.DynamicLossScale(8.0) for _ in range(2))
    assert values(step(first, FALSE)) == values(step(second, FALSE))


def test_each_member_of_an_ensemble_has_its_own_scale():
    members = jax.vmap(lambda scale: ours.DynamicLossScale(scale, period=1))(
        jnp.array([8.0, 16.0, 32.0])
    )
    moved = jax.vmap(eager)(members, jnp.array([True, False, True]))
    assert moved.loss_scale.tolist() == [16.0, 8.0, 64.0]


def test_the_axes_of_an_ensemble_can_be_named_by_a_tree():
    members = jax.tree.map(
        lambda leaf: jnp.stack([leaf, leaf]), ours.DynamicLossScale(8.0, period=1)
    )
    axes = jax.tree.map(lambda _: 0, members)
    moved = jax.vmap(eager, in_axes=(axes, 0))(members, jnp.array([True, False]))
    assert moved.loss_scale.tolist() == [16.0, 4.0]


def test_a_scan_gives_the_scales_of_a_loop():
    trace = flags(random.Random(0), 30)
    first = ours.DynamicLossScale(8.0, period=2, min_loss_scale=0.125)

    def step(carried, finite):
        carried = carried.adjust(finite)
        return carried, (carried.loss_scale, carried.counter)

    _, (scales, counters) = jax.lax.scan(step, first, jnp.array(trace))
    told = list(zip(scales.tolist(), counters.tolist(), strict=True))
    assert told == history(first, eager, trace)


# --- trees ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [None, {}, [1.0, 2], {"w": jnp.ones(3, jnp.float16), "n": jnp.int32(1)}],
    ids=repr,
)
def test_a_tree_without_bad_elements_is_finite(tree):
    assert bool(ours.all_finite(tree)) is bool(jmp.all_finite(tree)) is True


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64]
)
def test_one_bad_element_makes_a_tree_not_finite(bad, dtype):
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 5), dtype).at[1, 3].set(bad)}
    assert not ours.all_finite(tree)


def test_a_selection_keeps_the_structure():
    a = {"w": jnp.ones(2), "n": None, "key": jax.random.key(0)}
    b = {"w": jnp.zeros(2), "n": None, "key": jax.random.key(1)}
    chosen = ours.select_tree(False, a, b)
    assert chosen["w"].tolist() == [0.0, 0.0]
    assert chosen["n"] is None
    assert (jax.random.key_data(chosen["key"]) == jax.random.key_data(b["key"])).all()


@pytest.mark.parametrize(
    "pred", [jnp.ones(1, bool), jnp.ones([1]), jnp.int32(1), 1.0], ids=repr
)
def test_a_selection_by_anything_but_one_boolean_is_refused(pred):
    with pytest.raises(AssertionError, match="expected boolean scalar") as error:
        ours.select_tree(pred, None, None)
    assert isinstance(error.value, ConfigError)
    assert error.value.code == "GS101"


def test_two_leaves_that_differ_in_shape_are_named():
    a, b = {"w": [jnp.ones(2)]}, {"w": [jnp.ones(())]}
    with pytest.raises(ConfigError) as error:
        ours.select_tree(True, a, b)
    assert str(error.value) == (
        "w.0 has shape (2,) on one side and () on the other. Broadcasting would "
        "change one of them. Pass two trees whose leaves have the same "
        "shapes. [GS101]"
    )


# --- policies of dtypes ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("f16", "float16", "bf16", "bfloat16", "f32", "full", "float32", "half"),
        *("f64", "float64", "c=f16", "o=f16", "params=bf16,compute=f16,output=full"),
        *("p=f16,c=bf16", "compute=half", "c=f16,c=bf16"),
    ],
)
def test_a_policy_is_read_and_printed_as_by_jmp(name):
    mine, theirs = ours.get_policy(name), jmp.get_policy(name)
    assert vars(mine) == vars(theirs)
    assert str(mine) == str(theirs)


def test_a_policy_of_dtype_objects_can_be_printed():
    kinds = np.dtype("float16"), "float32", jnp.dtype(jnp.bfloat16)
    assert str(ours.Policy(*kinds)) == "p=f16,c=full,o=bf16"


@pytest.mark.parametrize("name", ["f17", "c=float", "", "p=f16=f32"])
def test_an_unknown_dtype_is_refused_in_jmps_words(name):
    with pytest.raises(ValueError, match="Unknown dtype") as error:
        ours.get_policy(name)
    assert "Pass full, half, f16, bf16, f32 or f64. [GS101]" in str(error.value)


@pytest.mark.parametrize("name", ["x=f16", "p=f16,half", "=f16"])
def test_an_unknown_part_is_refused_in_jmps_words(name):
    with pytest.raises(ValueError, match="Unknown key") as error:
        ours.get_policy(name)
    assert "Write params, compute or output" in str(error.value)


@pytest.mark.parametrize("cast", ["cast_to_half", "cast_to_full"])
def test_only_floating_point_arrays_are_cast(cast):
    tree = {"w": np.ones(2), "n": jnp.arange(3), "f": 1.0, "s": "text"}
    mine, theirs = getattr(ours, cast)(tree), getattr(jmp, cast)(tree)
    assert mine["w"].dtype == theirs["w"].dtype
    assert mine["n"] is tree["n"]
    assert (mine["f"], mine["s"]) == (1.0, "text")


@pytest.mark.parametrize("to", ["param", "compute", "output"])
def test_a_policy_casts_each_part_to_its_dtype(to):
    policy = ours.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    cast = getattr(policy, f"cast_to_{to}")({"w": jnp.ones(2)})
    assert cast["w"].dtype == getattr(policy, f"{to}_dtype")
