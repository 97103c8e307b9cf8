"""Which leaves of a tree are gradients, and what is said about those that are not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradscale import ConfigError, GradientError
from gradscale.jax.grad_tree import chosen, gradients_in, same_places, wide

TREE = {"amax": 0.0, "layers": [1.0, 2.0]}
ONES = jnp.ones(2)
FLOAT0 = np.zeros(2, jax.dtypes.float0)


def text_of(error):
    """Return the message of what `pytest.raises` caught."""
    return str(error.value)


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]
)
def test_what_is_narrower_than_f32_becomes_f32(dtype):
    assert wide(jnp.ones(2, dtype)).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
def test_what_is_as_wide_as_f32_keeps_its_dtype(dtype):
    assert wide(jnp.ones(2, dtype)).dtype == dtype


def test_f64_is_not_narrowed():
    with jax.enable_x64(True):
        assert wide(np.float64(1e300)).dtype == jnp.float64


def test_a_python_number_becomes_an_array():
    assert wide(0.5).dtype == jnp.float32


def test_no_mask_chooses_every_leaf():
    assert chosen(TREE, None) == [True, True, True]


@pytest.mark.parametrize(
    "mask",
    [
        {"amax": False, "layers": [True, True]},
        {"amax": False, "layers": True},
        lambda tree: {"amax": False, "layers": True},
        lambda tree: jax.tree.map(lambda leaf: leaf > 0.0, tree),
    ],
    ids=["tree", "prefix", "function that returns a prefix", "function of the tree"],
)
def test_a_mask_says_of_each_leaf_whether_it_is_a_gradient(mask):
    assert chosen(TREE, mask) == [False, True, True]


def test_one_bool_stands_for_the_whole_tree():
    assert chosen(TREE, False) == [False, False, False]


def test_a_mask_may_choose_a_single_leaf_of_a_list():
    mask = {"amax": False, "layers": [False, True]}
    assert chosen(TREE, mask) == [False, False, True]


def test_a_mask_of_an_equinox_model_is_a_tree_and_not_called():
    model = eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    assert chosen(params, mask) == [True, False, True, False]


def test_a_mask_may_hold_numpy_bools():
    mask = {"amax": np.False_, "layers": np.True_}
    assert chosen(TREE, mask) == [False, True, True]


def test_a_mask_of_an_equinox_model_may_be_an_upper_part():
    model = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    mask = eqx.tree_at(lambda tree: (tree.weight, tree.bias), params, (False, True))
    assert chosen(params, mask) == [False, True]


@pytest.mark.parametrize(
    "mask",
    [
        {"amax": True},
        {"amax": True, "layers": True, "head": True},
        {"amax": True, "layers": [True]},
        {"amax": [True], "layers": True},
        [True, True],
    ],
    ids=["a key short", "a key more", "a short list", "too deep", "another kind"],
)
def test_a_mask_of_another_structure_is_refused(mask):
    with pytest.raises(ConfigError) as caught:
        chosen(TREE, mask)
    assert "mask does not fit the gradients" in text_of(caught)
    assert ".." not in text_of(caught)
    assert "\n" not in text_of(caught)
    assert "it must have their structure, or a prefix" in text_of(caught)
    assert "Pass a tree of True and False" in text_of(caught)
    assert text_of(caught).endswith("[GS101]")


@pytest.mark.parametrize(
    ("strange", "shown"),
    [(1, "1 of type int"), ("yes", "'yes' of type str"), (0.0, "0.0 of type float")],
)
def test_a_mask_of_anything_but_bools_is_refused(strange, shown):
    with pytest.raises(ConfigError) as caught:
        chosen(TREE, {"amax": True, "layers": strange})
    assert f"mask has a leaf {shown}" in text_of(caught)
    assert "Use True for a scaled gradient and False" in text_of(caught)
    assert text_of(caught).endswith("[GS101]")


def test_a_mask_of_arrays_is_refused():
    with pytest.raises(ConfigError, match="cannot be an array"):
        chosen(TREE, {"amax": True, "layers": jnp.array(True)})


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (jnp.arange(2), "int32"),
        (jnp.ones(2, jnp.uint8), "uint8"),
        (jnp.ones(2, bool), "bool"),
        (jnp.ones(2, jnp.int4), "int4"),
        (FLOAT0, "float0"),
        (7, "int32"),
        (True, "bool"),
        ("word", "str"),
        (print, "builtin_function_or_method"),
    ],
)
def test_a_leaf_without_a_derivative_is_named_with_its_kind(leaf, kind):
    with pytest.raises(GradientError) as caught:
        gradients_in({"block": [ONES, leaf]})
    assert f"The gradient of block.1 is {kind}." in text_of(caught)
    assert "It carries no derivative" in text_of(caught)
    assert "eqx.filter(model, eqx.is_inexact_array)" in text_of(caught)
    assert "pass a mask that is False for it" in text_of(caught)
    assert text_of(caught).endswith("[GS106]")


def test_a_bare_array_is_called_the_tree_itself():
    with pytest.raises(GradientError, match="The gradient of the tree itself is int32"):
        gradients_in(jnp.arange(2))


@pytest.mark.parametrize(
    "leaf",
    [jnp.arange(2), FLOAT0, "word", None],
    ids=["integer", "float0", "text", "None"],
)
def test_a_masked_leaf_may_be_anything(leaf):
    leaves, flags, _ = gradients_in({"a": leaf, "b": ONES}, {"a": False, "b": True})
    assert flags == [False] * (leaf is not None) + [True]
    assert leaves[-1] is ONES


@pytest.mark.parametrize("tree", [None, {}, [], {"a": None, "b": [None]}])
def test_a_tree_without_a_gradient_is_refused(tree):
    with pytest.raises(GradientError) as caught:
        gradients_in(tree)
    assert f"There is no gradient in {tree!r}." in text_of(caught)
    assert "can neither be checked nor taken" in text_of(caught)
    assert "Pass the gradients that jax.grad returned" in text_of(caught)
    assert text_of(caught).endswith("[GS103]")


def test_a_tree_of_which_optax_masks_every_leaf_is_no_mistake():
    leaves, flags, _ = gradients_in({"a": optax.MaskedNode()})
    assert (leaves, flags) == ([], [])


def test_none_stands_for_what_is_not_trained():
    leaves, flags, structure = gradients_in({"a": None, "b": ONES})
    assert flags == [True]
    assert jax.tree.unflatten(structure, leaves)["a"] is None


@pytest.mark.parametrize("number", [0.5, 2j, np.float32(0.5), np.float64(0.5)])
def test_a_single_number_is_a_gradient(number):
    assert gradients_in({"a": number})[1] == [True]


def test_gradients_of_all_parameters_belong_to_them():
    same_places({"a": None, "b": ONES}, {"a": None, "b": ONES})


def test_gradients_are_not_compared_with_parameters_nobody_passed():
    same_places({"a": ONES}, None)


def test_a_parameter_without_a_gradient_is_named():
    with pytest.raises(GradientError) as caught:
        same_places({"a": None, "b": ONES}, {"a": ONES, "b": ONES})
    assert "a has no gradient (1 such leaves)" in text_of(caught)
    assert "pair the wrong arrays" in text_of(caught)
    assert "Differentiate with respect to the same tree" in text_of(caught)
    assert text_of(caught).endswith("[GS106]")


def test_a_gradient_without_a_parameter_is_named():
    with pytest.raises(GradientError, match=r"c\.0 is no parameter \(1 such leaves\)"):
        same_places({"b": ONES, "c": [ONES]}, {"b": ONES})


def test_all_leaves_out_of_place_are_counted():
    with pytest.raises(GradientError, match=r"a has no gradient \(3 such leaves\)"):
        same_places({"c": ONES}, {"a": ONES, "b": ONES})
