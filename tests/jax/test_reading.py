"""What one read of the gradients shows: finite, amax, norm and every leaf's peak."""

import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import ConfigError, DynamicScale, GradientError, StateError
from gradscale.jax import all_finite, culprits, init, loss_scaled, observe
from gradscale.jax.reading import SHIFT
from gradscale.jax.reduce import LONG_ROW, SMALL, sweep, sweep_together

INF, NAN = float("inf"), float("nan")
F32_MAX = float(np.finfo(np.float32).max)
# Traced once for each structure: a thousand examples cost no more than ten.
observed = jax.jit(observe)

# A tree of a million f32 additions is 20 roundings deep, each 2^-25 on average; the
# root halves the sum of them.
NORM_TOLERANCE = 2.0**-20

DTYPES = {
    "f16": (jnp.float16, (INF, -INF, NAN)),
    "bf16": (jnp.bfloat16, (INF, -INF, NAN)),
    "f32": (jnp.float32, (INF, -INF, NAN)),
    # This fp8 has no inf.
    "e4m3": (jnp.float8_e4m3fn, (NAN,)),
    "e5m2": (jnp.float8_e5m2, (INF, -INF, NAN)),
    "complex64": (
        jnp.complex64,
        (complex(INF, 0), complex(0, -INF), complex(1, NAN), complex(NAN, 0)),
    ),
}
SHAPES = [
    (),
    (7,),
    (SMALL + 1,),
    (3, LONG_ROW),
    (SMALL // LONG_ROW + 1, LONG_ROW),
    (SMALL // 8, 9),
    (2, 3, 4),
    (LONG_ROW, 1, LONG_ROW * 5),
]


def at(index, value, shape=(8,), dtype=jnp.float32):
    """Return ones with one element replaced, counted in memory order."""
    array = np.ones(shape, dtype)
    array.reshape(-1)[index] = value
    return jnp.asarray(array)


def of_each_dtype(shape):
    """Return ones of every dtype: what is compiled depends on the shape alone."""
    return {name: np.ones(shape, dtype) for name, (dtype, _) in DTYPES.items()}


def ordered(tree):
    """Return the leaves as f64 on the host."""
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def true_norm(tree):
    """Return the norm in f64, of values for which its squares cannot overflow."""
    return math.sqrt(sum(float((leaf**2).sum()) for leaf in ordered(tree)))


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


# One bad element, anywhere


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30)
@given(st.data())
def test_one_bad_element_anywhere_is_seen_and_its_leaf_named(shape, data):
    grads = of_each_dtype(shape)
    name = data.draw(st.sampled_from(list(DTYPES)))
    place = data.draw(st.integers(0, math.prod(shape) - 1))
    bad = data.draw(st.sampled_from(DTYPES[name][1]))
    grads[name].reshape(-1)[place] = bad
    seen = observed(grads)
    assert not seen.finite
    assert not math.isfinite(seen.amax)
    assert not math.isfinite(seen.norm)
    assert culprits(seen.peaks) == (name,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_finite_elements_of_every_dtype_are_finite(shape):
    seen = observed(of_each_dtype(shape))
    assert seen.finite
    assert float(seen.amax) == 1.0
    assert set(map(float, jax.tree.leaves(seen.peaks))) == {1.0}


MIXED = {
    "a": np.ones(3, np.float16),
    "b": [np.ones(3, np.float32), np.ones((300, LONG_ROW), np.float32)],
    "c": np.ones((), jnp.bfloat16),
    "d": {"e": np.ones(3, np.float16), "f": np.ones((300, LONG_ROW), np.float16)},
    "g": (np.ones(SMALL + 1, np.float32), np.ones(3, jnp.float8_e5m2)),
    "h": np.ones((300, LONG_ROW), np.float32),
}
NAMES = ["a", "b.0", "b.1", "c", "d.e", "d.f", "g.0", "g.1", "h"]


@given(st.data())
def test_exactly_the_bad_leaves_are_named_whatever_their_dtype_and_shape(data):
    leaves, structure = jax.tree.flatten(MIXED)
    bad = data.draw(st.sets(st.sampled_from(range(len(leaves)))))
    for place in bad:
        leaves[place] = leaves[place].copy()
        element = data.draw(st.integers(0, leaves[place].size - 1))
        leaves[place].reshape(-1)[element] = data.draw(st.sampled_from([INF, NAN]))
    seen = observed(jax.tree.unflatten(structure, leaves))
    assert bool(seen.finite) == (not bad)
    assert culprits(seen) == tuple(NAMES[place] for place in sorted(bad))


@pytest.mark.parametrize("order", [(NAN, INF), (INF, NAN)])
def test_nan_wins_over_inf_in_amax_and_peaks(order):
    seen = observed([jnp.array(order), jnp.array([order[0]])])
    assert math.isnan(seen.amax)
    assert math.isnan(seen.peaks[0])


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001])
def test_every_nan_counts_whatever_its_sign_and_payload(payload):
    bits = jnp.array([0x3F800000, payload], jnp.uint32)
    seen = observe(jax.lax.bitcast_convert_type(bits, jnp.float32))
    assert not seen.finite
    assert math.isnan(seen.amax)


def test_an_empty_leaf_is_finite_with_peak_zero():
    seen = observed({"none": jnp.ones((0, 3)), "some": jnp.full(2, -2.0)})
    assert seen.finite
    assert (float(seen.peaks["none"]), float(seen.amax)) == (0.0, 2.0)


def test_empty_leaves_alone_are_finite_with_amax_and_norm_zero():
    seen = observed([jnp.ones(0), jnp.ones((3, 0))])
    assert (bool(seen.finite), float(seen.amax), float(seen.norm)) == (True, 0.0, 0.0)


# amax


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "e4m3", "e5m2"])
@given(st.lists(st.floats(-200.0, 200.0, width=16), min_size=12, max_size=12))
def test_amax_is_the_largest_magnitude_exactly(name, values):
    array = np.array(values).astype(DTYPES[name][0])
    seen = observed({"w": array})
    assert float(seen.amax) == float(np.abs(array.astype(np.float64)).max())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=24, max_size=24))
def test_peaks_are_the_largest_magnitudes_of_the_leaves_exactly(values):
    array = np.array(values, np.float32)
    # XLA takes subnormals for 0 on the CPU.
    array[np.abs(array) < 2.0**-126] = 0.0
    tree = {"a": array[:4], "b": [array[4:16].reshape(3, 4), array[16:]]}
    seen = observed(tree)
    peaks = [float(peak) for peak in jax.tree.leaves(seen.peaks)]
    assert peaks == [float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree)]
    assert float(seen.amax) == max(peaks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_amax_finds_the_largest_element_of_any_shape(shape, share):
    grads = of_each_dtype(shape)
    grads["f32"].reshape(-1)[int(share * (math.prod(shape) - 1))] = -3.5
    assert float(observed(grads).amax) == 3.5


def test_amax_is_that_of_the_gradients_as_they_came():
    assert float(observe(jnp.array([-6.0, 2.0]), 4.0).amax) == 6.0


def test_the_largest_f16_is_finite():
    seen = observed(jnp.array([65504.0], jnp.float16))
    assert (bool(seen.finite), float(seen.amax)) == (True, 65504.0)


def test_amax_of_complex_numbers_is_that_of_their_parts():
    assert float(observed(jnp.array([3.0 - 4.0j, 1.0 + 2.0j])).amax) == 4.0


# norm

MAGNITUDES = st.floats(1.0, 10.0, width=32)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(MAGNITUDES, st.integers(-30, 29)) | st.just((0.0, 0)),
        min_size=16,
        max_size=16,
    )
)
def test_norm_of_any_mixture_from_1e_minus_30_to_1e30_is_right_to_rounding(drawn):
    values = np.array([mantissa * 10.0**power for mantissa, power in drawn])
    array = values.astype(np.float32)
    tree = {"a": array[:5], "b": array[5:]}
    assert float(observed(tree).norm) == pytest.approx(
        true_norm(tree), rel=NORM_TOLERANCE, abs=0.0
    )


@pytest.mark.parametrize("power", range(-30, 31, 5))
@pytest.mark.parametrize("shape", [(4,), (SMALL + 1,), (300, LONG_ROW)], ids=str)
def test_norm_neither_overflows_nor_vanishes(power, shape):
    array = np.full(shape, 10.0**power, np.float32)
    assert float(observed({"w": array}).norm) == pytest.approx(
        true_norm(array), rel=NORM_TOLERANCE, abs=0.0
    )


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**16, 2.0**100, 3.0])
def test_norm_is_that_of_the_unscaled_gradients(scale):
    grads = np.array([3.0, -4.0], np.float32)
    assert float(observe(grads * np.float32(scale), scale).norm) == pytest.approx(
        5.0, rel=NORM_TOLERANCE
    )


def test_norm_of_f16_does_not_underflow_at_a_large_scale():
    grads = jnp.full(4, 2.0**-24, jnp.float16)
    assert float(observed(grads, 2.0**40).norm) == 2.0**-63


def test_norm_of_a_pythagorean_triple_is_exact():
    assert float(observed({"a": jnp.array(3.0), "b": jnp.array(-4.0)}).norm) == 5.0


def test_norm_of_zeros_is_zero():
    assert float(observe(jnp.zeros(3)).norm) == 0.0


def test_norm_of_complex_numbers_takes_both_parts():
    assert float(observed(jnp.array([3.0 + 4.0j])).norm) == 5.0


@pytest.mark.parametrize(
    "shape", [(2**20,), (2**10, 2**10), (2**18, 4), (4, 2**18)], ids=str
)
def test_norm_of_a_million_elements_is_right_to_rounding(shape):
    array = np.full(shape, 0.1, np.float32)
    assert float(observed({"w": array}).norm) == pytest.approx(
        true_norm(array), rel=NORM_TOLERANCE
    )


def test_norm_of_many_leaves_takes_all_of_them():
    assert float(observed([np.full(3, 2.0, np.float32)] * 75).norm) == 30.0


@given(st.integers(0, 2**32 - 1))
def test_norm_equals_that_of_optax(seed):
    random = np.random.default_rng(seed)
    tree = {
        "a": random.normal(size=(40, 30)).astype(np.float32),
        "b": [random.normal(size=50).astype(np.float32)],
    }
    assert float(observed(tree).norm) == pytest.approx(
        float(optax.tree.norm(tree)), rel=NORM_TOLERANCE
    )


def test_norm_has_a_derivative():
    slope = jax.grad(lambda grads: observe(grads).norm)(jnp.array([3.0, 4.0]))
    assert slope == pytest.approx([0.6, 0.8], rel=NORM_TOLERANCE)


def test_norm_of_zeros_has_a_finite_derivative():
    slope = jax.grad(lambda grads: observe(grads).norm)(jnp.zeros(2))
    assert slope.tolist() == [0.0, 0.0]


# Overflow in unscaling


@pytest.mark.parametrize("value", [-65504.0, 65504.0])
def test_gradients_that_overflow_when_unscaled_are_not_finite(value):
    # 65504 = 2^16 - 2^5, so the largest f32 lies between these two.
    grads = at(1, value, dtype=jnp.float16)
    assert observed(grads, 2.0**-112).finite
    assert not observed(grads, 2.0**-113).finite


def test_an_overflow_in_unscaling_leaves_amax_as_it_came():
    seen = observed(jnp.array([3e38]), 0.5)
    assert (bool(seen.finite), float(seen.amax)) == (False, float(np.float32(3e38)))
    assert float(seen.norm) == INF


def test_a_masked_leaf_may_overflow_when_unscaled():
    grads = {"w": jnp.ones(2), "amax": jnp.array(3e38)}
    assert observe(grads, 0.5, mask={"w": True, "amax": False}).finite


# The two ways to sweep


@functools.partial(jax.jit, static_argnames="way")
def facts_of(leaves, *, way):
    """Return bits, small and large of each leaf, in order."""
    found = {}
    inverse = jnp.float32(0.25)
    for places, facts in way(list(enumerate(leaves)), inverse, SHIFT, lambda _: None):
        for row, place in enumerate(places):
            found[place] = tuple(fact[row] for fact in facts)
    return [found[place] for place in range(len(leaves))]


@pytest.mark.parametrize("shape", [(0,), *SHAPES], ids=str)
def test_both_ways_to_sweep_give_the_same_facts(shape):
    drawn = np.random.default_rng(7).integers(-8, 9, shape)
    dtypes = [np.float32, np.float16, np.complex64, np.float32]
    leaves = [drawn.astype(dtype) for dtype in dtypes]
    one, other = (facts_of(leaves, way=way) for way in (sweep, sweep_together))
    # Squares of small integers add up exactly, in whatever order.
    assert jax.device_get(one) == jax.device_get(other)
    assert len(one) == 4


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("shape", [(8,), (SMALL + 1,), (300, LONG_ROW)], ids=str)
@pytest.mark.parametrize("way", [sweep, sweep_together])
def test_either_way_to_sweep_sees_one_bad_element(bad, shape, way):
    leaves = [at(3, bad, shape), at(3, 2.0, shape)]
    (bits, _, _), (good, _, _) = facts_of(leaves, way=way)
    # Inf is the first pattern that is no number, and no NaN comes before it.
    assert int(bits) >= 0x7F800000
    assert float(jax.lax.bitcast_convert_type(good, jnp.float32)) == 2.0


@jax.jit
def observed_on_a_gpu(grads):
    """Read gradients as on a single GPU, if it is traced where that is the backend."""
    return observe(grads, 0.5)


@pytest.mark.parametrize("bad", [(), ("b.1",), ("a", "c", "h"), NAMES], ids=str)
def test_what_is_read_on_a_gpu_is_what_is_read_here(monkeypatch, bad):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    grads = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            at(0, NAN, leaf.shape, leaf.dtype)
            if jax.tree_util.keystr(path, simple=True, separator=".") in bad
            else leaf
        ),
        MIXED,
    )
    seen = observed_on_a_gpu(grads)
    assert culprits(seen) == tuple(bad)
    assert bool(seen.finite) == (not bad)
    # All ones, and half of what they are scaled by.
    norm = 2.0 * math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(MIXED)))
    assert bad or float(seen.norm) == pytest.approx(norm, rel=NORM_TOLERANCE)
    assert bad or float(seen.amax) == 1.0


# Structure


@pytest.mark.parametrize(
    "grads",
    [
        jnp.ones(2),
        [jnp.ones(2), (jnp.ones(3),)],
        {"a": None, "b": jnp.ones(2)},
        Pair(jnp.ones(2), jnp.ones(())),
        {"b": 1.0, "a": jnp.ones(2)},
        eqx.filter(eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.is_inexact_array),
        {"masked": optax.MaskedNode(), "kept": jnp.ones(2)},
    ],
    ids=["array", "list", "None", "tuple", "number", "equinox", "MaskedNode"],
)
def test_peaks_have_the_structure_of_the_gradients(grads):
    peaks = observe(grads).peaks
    assert jax.tree.structure(peaks) == jax.tree.structure(grads)
    assert all(peak.shape == () for peak in jax.tree.leaves(peaks))


def test_peaks_stand_where_their_leaves_stand():
    grads = {
        "z": jnp.full(2, 1.0),
        "a": [jnp.full((2, 2), 2.0), jnp.full(2, -3.0)],
        "m": jnp.full(2, 4.0, jnp.float16),
    }
    peaks = jax.device_get(observed(grads).peaks)
    assert peaks == {"z": 1.0, "a": [2.0, 3.0], "m": 4.0}


def test_every_figure_is_f32_whatever_the_gradients_are():
    seen = observed({"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.complex64)})
    figures = [seen.amax, seen.norm, *jax.tree.leaves(seen.peaks)]
    assert {figure.dtype for figure in figures} == {jnp.dtype("float32")}
    assert seen.finite.dtype == jnp.bool_


def test_the_gradients_are_not_changed():
    grads = {"w": np.array([1.0, INF], np.float32)}
    observe(grads, 8.0)
    assert grads["w"].tolist() == [1.0, INF]


# f64


def test_an_f64_beyond_f32_is_finite_and_shown_as_the_largest_f32():
    with jax.enable_x64(True):
        seen = observed(jnp.array([1e300, 1.0]))
        assert (bool(seen.finite), float(seen.amax)) == (True, F32_MAX)


def test_a_bad_f64_is_seen():
    with jax.enable_x64(True):
        assert not observed(jnp.array([1e300, NAN])).finite
        assert not observed(jnp.array([1e300, -INF])).finite


@pytest.mark.parametrize("bad", [(), ("wide",), ("narrow",)], ids=str)
def test_f64_and_f32_are_read_side_by_side(bad):
    with jax.enable_x64(True):
        grads = {"wide": jnp.array([3.0]), "narrow": jnp.array([4.0], jnp.float32)}
        grads.update({name: jnp.full_like(grads[name], NAN) for name in bad})
        seen = observed(grads)
        assert culprits(seen) == bad
        assert bool(seen.finite) == (not bad)
        assert bad or (float(seen.amax), float(seen.norm)) == (4.0, 5.0)


def test_norm_of_f64_is_right_to_rounding():
    with jax.enable_x64(True):
        assert float(observed(jnp.array([3e20, 4e20])).norm) == float(np.float32(5e20))


# Masks

MASKED = [
    jnp.full(2, NAN),
    jnp.array(INF),
    jnp.arange(2),
    np.zeros(2, jax.dtypes.float0),
    "word",
]
KINDS = ["NaN", "inf", "integer", "float0", "text"]


@pytest.mark.parametrize("leaf", MASKED, ids=KINDS)
def test_a_masked_leaf_is_not_read(leaf):
    grads = {"state": leaf, "w": jnp.array([3.0, 4.0])}
    seen = observe(grads, mask={"state": False, "w": True})
    assert seen.finite
    assert (float(seen.amax), float(seen.norm)) == (4.0, 5.0)
    assert jax.device_get(seen.peaks) == {"state": 0.0, "w": 4.0}


def test_peaks_stay_in_order_around_masked_leaves():
    grads = [jnp.array(float(n)) for n in range(1, 7)]
    seen = observe(grads, mask=[True, False, True, True, False, True])
    assert jax.device_get(seen.peaks) == [1.0, 0.0, 3.0, 4.0, 0.0, 6.0]


def test_a_mask_that_leaves_everything_out_sees_nothing_bad():
    seen = observe({"w": jnp.array(NAN)}, mask=False)
    assert (bool(seen.finite), float(seen.amax), float(seen.norm)) == (True, 0.0, 0.0)


def test_a_mask_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="mask does not fit the gradients"):
        observe({"w": jnp.ones(2)}, mask={"v": True})


# all_finite, the rule's view, and errors


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (INF, False), (NAN, False)])
def test_all_finite_is_what_observe_says(value, finite):
    assert bool(all_finite({"a": jnp.ones(2), "b": jnp.array(value)})) is finite


def test_all_finite_leaves_out_what_the_mask_leaves_out():
    grads = {"a": jnp.ones(2), "b": jnp.array(NAN)}
    assert all_finite(grads, mask={"a": True, "b": False})


def test_a_reading_tells_the_rule_finite_amax_and_the_loss():
    seen = observe(jnp.array([2.0, INF])).observed(loss_finite=False)
    assert (bool(seen.finite), float(seen.amax)) == (False, INF)
    assert not seen.loss_finite


def test_a_reading_takes_the_loss_to_be_finite():
    assert observe(jnp.ones(2)).observed().loss_finite


@pytest.mark.parametrize("kind", ["policy", "optimizer", "number", "array"])
def test_observe_finds_the_scale_in_whatever_holds_it(kind):
    policy = DynamicScale(init_scale=8.0)
    optimizer = loss_scaled(optax.sgd(1.0), policy)
    holders = {
        "policy": init(policy),
        "optimizer": optax.chain(optimizer).init(jnp.ones(2)),
        "number": 8,
        "array": np.float32(8.0),
    }
    assert float(observe(jnp.array([24.0, 32.0]), holders[kind]).norm) == 5.0


def test_observe_refuses_what_holds_no_scale():
    with pytest.raises(
        StateError, match=r"no state of loss_scaled in this dict.*GS302"
    ):
        observe(jnp.ones(2), {"scale": 8.0})


@pytest.mark.parametrize("read", [observe, all_finite])
def test_an_integer_gradient_is_refused(read):
    with pytest.raises(GradientError, match=r"The gradient of w is int32.*GS106"):
        read({"w": jnp.arange(3)})


@pytest.mark.parametrize("read", [observe, all_finite])
def test_a_tree_without_gradients_is_refused(read):
    with pytest.raises(GradientError, match=r"no gradient in None.*jax\.grad.*GS103"):
        read(None)
