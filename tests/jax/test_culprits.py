"""The names of the leaves that were not finite."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from gradscale import ConfigError, DynamicScale
from gradscale.jax import MultiSteps, culprits, last, loss_scaled, observe

INF, NAN = float("inf"), float("nan")
OPTIMIZER = loss_scaled(optax.sgd(0.1), DynamicScale())


def ruined(tree, *names):
    """Return the tree with NaN in the leaves of these names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf * NAN
            if jax.tree_util.keystr(path, simple=True, separator=".") in names
            else leaf
        ),
        tree,
    )


def last_of(grads, params, optimizer=OPTIMIZER):
    """Return the last step after one update."""
    return last(optimizer.update(grads, optimizer.init(params), params)[1])


TREE = {
    "embed": jnp.ones(2),
    "layers": [{"w": jnp.ones(2), "b": jnp.ones(2)} for _ in range(2)],
    "head": (jnp.ones(2), None),
}
NAMES = [
    "embed",
    "head.0",
    "layers.0.b",
    "layers.0.w",
    "layers.1.b",
    "layers.1.w",
]


@given(st.sets(st.sampled_from(NAMES)))
def test_every_bad_leaf_of_a_tree_is_named_in_its_order(bad):
    assert culprits(ruined(TREE, *bad)) == tuple(sorted(bad))


@pytest.mark.parametrize("bad", [(), ("layers.1.w",), ("embed", "head.0"), NAMES])
def test_a_reading_names_its_culprits(bad):
    assert culprits(observe(ruined(TREE, *bad))) == tuple(bad)


@pytest.mark.parametrize("bad", [(), ("layers.1.w",), ("embed", "head.0"), NAMES])
def test_the_last_step_names_its_culprits_by_the_parameters(bad):
    assert culprits(last_of(ruined(TREE, *bad), TREE), TREE) == tuple(bad)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_every_kind_of_bad_value_makes_a_culprit(bad):
    grads = {"a": jnp.ones(3), "b": jnp.array([1.0, bad])}
    assert culprits(grads) == culprits(observe(grads)) == ("b",)


def test_a_leaf_that_only_overflows_when_unscaled_is_no_culprit_by_itself():
    seen = observe({"a": jnp.array([3e38])}, 0.5)
    assert not seen.finite
    assert culprits(seen) == ()


def test_any_tree_of_arrays_can_be_asked():
    tree = {"step": jnp.int32(3), "mu": {"w": jnp.array(NAN, jnp.float16)}, "on": True}
    assert culprits(tree) == ("mu.w",)


def test_numpy_arrays_and_numbers_can_be_asked():
    assert culprits({"a": np.array([1.0, INF]), "b": 1.0, "c": NAN}) == ("a", "c")


def test_a_bare_array_is_called_the_tree_itself():
    assert culprits(jnp.array(NAN)) == ("the tree itself",)


@pytest.mark.parametrize("tree", [None, {}, []])
def test_a_tree_without_leaves_has_no_culprits(tree):
    assert culprits(tree) == ()


def test_a_leaf_the_mask_leaves_out_is_no_culprit():
    grads = {"amax": jnp.array(NAN), "w": jnp.array(INF)}
    assert culprits(observe(grads, mask={"amax": False, "w": True})) == ("w",)


def test_the_last_step_knows_nothing_bad_of_a_masked_leaf():
    params = {"amax": jnp.ones(()), "w": jnp.ones(())}
    optimizer = loss_scaled(
        optax.sgd(0.1), DynamicScale(), mask={"amax": False, "w": True}
    )
    step = last_of(ruined(params, "amax"), params, optimizer)
    assert step.applied
    assert culprits(step, params) == ()


@pytest.mark.parametrize("params", [None, {"w": jnp.ones(2)}, [jnp.ones(1)] * 7])
def test_parameters_that_do_not_fit_are_refused(params):
    step = last_of(TREE, TREE)
    with pytest.raises(ConfigError) as caught:
        culprits(step, params)
    text = str(caught.value)
    assert f"params has {len(jax.tree.leaves(params))} leaves" in text
    assert "the last step had 6 gradients" in text
    assert "keeps a figure for each and no names" in text
    assert "Pass the parameters that init() was called with" in text
    assert text.endswith("[GS101]")


def test_culprits_of_accumulated_gradients_are_named():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    optimizer = MultiSteps(OPTIMIZER, 2)
    state = optimizer.init(params)
    for grads in (ruined(params, "b"), params):
        _, state = optimizer.update(grads, state, params)
    assert culprits(last(state), params) == ("b",)


def test_leaves_of_an_equinox_model_have_the_names_of_its_fields():
    model = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    grads = ruined(params, "layers.0.bias", "layers.1.weight")
    assert culprits(grads) == ("layers.0.bias", "layers.1.weight")
    assert culprits(last_of(grads, params), params) == culprits(grads)


def test_leaves_of_an_nnx_model_have_the_names_of_its_attributes():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(2, 2, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(2, 1, rngs=rngs)])

    model = Model(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, params)
    grads["blocks"][0]["kernel"][...] = jnp.full((2, 1), NAN)
    optimizer.update(model, grads)
    # Flax calls the array in a variable its value.
    assert culprits(last(optimizer), params) == ("blocks.0.kernel.value",)
    assert culprits(observe(grads)) == ("blocks.0.kernel.value",)
