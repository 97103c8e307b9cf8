"""The drop-in for flax's dynamic scale: the same scales, and none of its defects."""

import copy
import dataclasses
import inspect
import math
import os
import pickle
import random
import subprocess
import sys

import flax.training.dynamic_scale as theirs
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

from gradscale import GradientError
from gradscale.jax import flax as ours
from tests.strategies import flags

BOTH = pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "flax"])
LOWEST, HIGHEST = 2.0**-126, 2.0**126
WEIGHT = jnp.float32(0.5)


def product(weight, batch):
    """A loss whose gradient is the batch."""
    return weight * batch


def half(weight, batch):
    return weight.astype(jnp.float16) * batch


def walk(dynamic_scale, batches, loss=product, step=None, weight=WEIGHT):
    """Return the results of a run in which the weight is not moved."""
    step = step or (lambda kept, *given: kept.value_and_grad(loss)(*given))
    told = []
    for batch in batches:
        told.append(step(dynamic_scale, weight, batch))
        dynamic_scale = told[-1].dynamic_scale
    return told


def counted(**options):
    """Return a jitted step, and a list that grows when it is traced."""
    traced = []

    def step(dynamic_scale, weight, batch):
        traced.append(1)
        return dynamic_scale.value_and_grad(product)(weight, batch)

    return jax.jit(step, **options), traced


def scales(told):
    return [float(result.dynamic_scale.scale) for result in told]


def finite(told):
    return [bool(result.finite) for result in told]


# --- the same interface ---------------------------------------------------------------


def test_the_fields_are_those_of_flax_and_one_more():
    mine = [field.name for field in dataclasses.fields(ours.DynamicScale)]
    flaxs = [field.name for field in dataclasses.fields(theirs.DynamicScale)]
    assert mine == [*flaxs, "flax_count"]


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(theirs.DynamicScale)]
)
def test_a_default_is_that_of_flax(name):
    assert getattr(ours.DynamicScale(), name) == getattr(theirs.DynamicScale(), name)


def test_the_arguments_are_those_of_flax():
    mine = inspect.signature(ours.DynamicScale.value_and_grad)
    flaxs = inspect.signature(theirs.DynamicScale.value_and_grad)
    assert [(name, arg.default) for name, arg in mine.parameters.items()] == [
        (name, arg.default) for name, arg in flaxs.parameters.items()
    ]


def test_the_result_has_the_fields_of_flax():
    assert ours.DynamicScaleResult._fields == theirs.DynamicScaleResult._fields


@BOTH
def test_argnums_choose_what_is_differentiated(library):
    step = library.DynamicScale().value_and_grad(product, argnums=(0, 1))
    assert step(jnp.float32(3.0), jnp.float32(5.0)).grad == (5.0, 3.0)


@BOTH
def test_auxiliary_data_come_back_beside_the_loss(library):
    def loss(weight):
        return 2.0 * weight, {"twice": weight + weight}

    result = library.DynamicScale().value_and_grad(loss, has_aux=True)(jnp.float32(3.0))
    assert result.aux == (6.0, {"twice": 6.0})
    assert result.grad == 2.0


# --- the same scales ------------------------------------------------------------------


def settings(rng):
    return {
        "growth_factor": rng.choice((2.0, 4.0, 1.3)),
        "backoff_factor": rng.choice((0.5, 0.25, 0.7)),
        "growth_interval": rng.choice((0, 1, 2, 5)),
        "scale": jnp.float32(2.0 ** rng.randint(3, 20)),
        "minimum_scale": rng.choice((None, LOWEST, 0.37, 8.0)),
    }


def figures(result):
    """Return all that a step gave; a gradient that is not finite is only that."""
    kept = result.dynamic_scale
    grad = float(result.grad) if result.finite else None
    return float(kept.scale), int(kept.fin_steps), bool(result.finite), grad


# Each value of each setting.
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 6, 9, 13, 14, 17, 19])
def test_with_flaxs_count_every_step_is_that_of_flax_bit_for_bit(seed):
    rng = random.Random(seed)
    given = settings(rng)
    batches = [rng.uniform(0.1, 9.0) if ok else math.inf for ok in flags(rng, 40)]
    mine = walk(ours.DynamicScale(**given, flax_count=True), batches)
    flaxs = walk(theirs.DynamicScale(**given), batches)
    assert [figures(result) for result in mine] == [figures(result) for result in flaxs]


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_scale_grows_on_the_step_that_the_interval_names(interval):
    given, batches = {"growth_interval": interval}, [1.0] * (interval + 1)
    grown = [2.0**16] * (interval - 1) + [2.0**17]
    mine = scales(walk(ours.DynamicScale(**given), batches))
    assert mine[:interval] == grown
    assert scales(walk(theirs.DynamicScale(**given), batches)) == [2.0**16, *grown]
    late = ours.DynamicScale(**given, flax_count=True)
    assert scales(walk(late, batches)) == [2.0**16, *grown]


# --- flax's defects -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "wasted"), [(ours, 0), (theirs, 1)], ids=["ours", "flax"]
)
def test_steps_that_a_loss_in_f16_wastes(library, wasted):
    told = walk(library.DynamicScale(), [jnp.float16(1.0)] * 5, half)
    assert finite(told) == [False] * wasted + [True] * (5 - wasted)
    assert scales(told)[-1] == 2.0**15


@pytest.mark.parametrize(
    ("library", "wasted"), [(ours, 1), (theirs, 2)], ids=["ours", "flax"]
)
def test_steps_that_the_example_of_flax_wastes(library, wasted):
    # The gradient of p**2 is 2: with a scale of 2^15 it does not fit into f16.
    def loss(weight, _):
        return (2.0 * weight).astype(jnp.float16) ** 2

    told = walk(library.DynamicScale(), [None] * 5, loss)
    assert finite(told) == [False] * wasted + [True] * (5 - wasted)


def test_the_loss_is_what_the_function_gave():
    batch = jnp.float16(0.3)
    result = walk(ours.DynamicScale(scale=3.7e4), [batch], half)[0]
    assert result.aux.dtype == jnp.float16
    assert result.aux == jnp.float16(0.5) * batch


def test_the_first_loss_of_flax_is_lost():
    result = walk(theirs.DynamicScale(), [jnp.float16(1.0)], half)[0]
    assert jnp.isnan(result.aux)


@pytest.mark.parametrize(
    ("library", "times"), [(ours, 1), (theirs, 2)], ids=["ours", "flax"]
)
def test_how_often_a_run_is_traced(library, times):
    step, traced = counted(donate_argnums=0)
    walk(library.DynamicScale(growth_interval=2), [1.0, 1.0, math.inf, 1.0], step=step)
    assert len(traced) == times


def test_a_scale_that_was_given_as_a_python_float_is_traced_once():
    step, traced = counted()
    walk(ours.DynamicScale(scale=1024.0), [1.0] * 3, step=step)
    assert len(traced) == 1


def test_keyword_arguments_reach_the_function():
    step = ours.DynamicScale().value_and_grad(product)
    assert step(jnp.float32(3.0), batch=2.0).grad == 2.0


def test_keyword_arguments_do_not_reach_the_function_of_flax():
    step = theirs.DynamicScale().value_and_grad(product)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch'"):
        step(jnp.float32(3.0), batch=2.0)


# --- bounds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minimum", "scale", "overflows"),
    # The others begin where the first one is after most of them.
    [(None, 2.0**16, 200), *((low, LOWEST * 8, 20) for low in (0.0, LOWEST, 1e-45))],
)
def test_overflows_without_end_stay_above_zero_and_a_run_recovers(
    minimum, scale, overflows
):
    first = ours.DynamicScale(
        growth_interval=1, minimum_scale=minimum, scale=jnp.float32(scale)
    )
    told = walk(first, [math.inf] * overflows + [1.0] * 3)
    grown = [LOWEST * factor for factor in (1.0, 2.0, 4.0, 8.0)]
    assert scales(told)[overflows - 1 :] == grown
    assert [float(result.grad) for result in told[overflows:]] == [1.0, 1.0, 1.0]


def total(weights, batch):
    return (weights * batch).sum()


def grads_of_growths(dynamic_scale):
    """Return the different gradients, all 1, that two hundred growths give."""
    told = walk(dynamic_scale, [1.0] * 200, total, weight=jnp.ones(2))
    return {grad for result in told for grad in result.grad.tolist()}


def test_two_hundred_growths_end_below_infinity():
    told = walk(ours.DynamicScale(growth_interval=1), [1.0] * 200)
    assert scales(told)[-1] == HIGHEST


def test_two_hundred_growths_lose_no_gradient():
    assert grads_of_growths(ours.DynamicScale(growth_interval=1)) == {1.0}


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="XLA flushes subnormals on the CPU only"
)
def test_two_hundred_growths_lose_the_gradients_of_flax():
    assert grads_of_growths(theirs.DynamicScale(growth_interval=0)) == {1.0, 0.0}


def test_backing_off_ends_at_the_minimum():
    told = walk(ours.DynamicScale(scale=8.0, minimum_scale=3.0), [math.inf] * 3)
    assert scales(told) == [4.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "highest"),
    [(jnp.float16, 2.0**15), (jnp.bfloat16, HIGHEST), (jnp.float32, HIGHEST)],
    ids=["f16", "bf16", "f32"],
)
def test_the_scale_stays_within_what_the_dtype_of_the_loss_holds(dtype, highest):
    def loss(weight, batch):
        return weight.astype(dtype) * batch

    first = ours.DynamicScale(growth_interval=1, scale=highest / 2)
    told = walk(first, [dtype(0.5)] * 3, loss)
    assert scales(told) == [highest] * 3
    assert finite(told) == [True] * 3
    assert {float(result.grad) for result in told} == {0.5}


def test_a_lowered_scale_is_the_one_that_moves_and_that_gradients_are_divided_by():
    told = walk(ours.DynamicScale(scale=2.0**20), [jnp.float16(math.inf)] * 2, half)
    assert scales(told) == [2.0**14, 2.0**13]
    after = walk(ours.DynamicScale(scale=2.0**20), [jnp.float16(0.25)], half)
    assert (scales(after), float(after[0].grad)) == ([2.0**15], 0.25)


# --- gradients ------------------------------------------------------------------------


def test_a_small_f16_gradient_does_not_underflow():
    step = ours.DynamicScale().value_and_grad(lambda weight: weight * jnp.float16(6e-8))
    assert step(jnp.float16(1.0)).grad > 0.0


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.float16, jnp.bfloat16, jnp.float32]
)
def test_a_gradient_of_a_narrow_weight_is_f32(dtype):
    step = ours.DynamicScale(scale=2.0).value_and_grad(
        lambda weight: weight.astype(jnp.float32) * 0.5
    )
    grad = step(dtype(1.0)).grad
    assert (grad.dtype, float(grad)) == (jnp.float32, 0.5)


def test_an_f64_gradient_stays_f64():
    with jax.enable_x64(True):
        step = ours.DynamicScale().value_and_grad(product)
        result = step(jnp.float64(1.0), jnp.float64(1.0 + 2.0**-50))
        assert float(result.grad) == 1.0 + 2.0**-50
        assert result.dynamic_scale.scale.dtype == jnp.float32


def test_a_complex_gradient_keeps_both_parts():
    def loss(weight):
        return (weight * (1.0 + 2.0j)).real

    weight = jnp.complex64(1.0)
    grad = ours.DynamicScale().value_and_grad(loss)(weight).grad
    assert grad == jax.grad(loss)(weight)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"layers": [{"w": jnp.ones(2), "steps": jnp.int32(3)}]}, "layers.0.steps"),
        ({"w": jnp.ones(2), "mask": jnp.array(True)}, "mask"),
    ],
    ids=["integer", "boolean"],
)
def test_a_leaf_that_is_not_floating_point_is_named(params, name):
    def loss(params):
        return sum(leaf.sum() * 1.0 for leaf in jax.tree.leaves(params))

    with pytest.raises(GradientError) as error:
        ours.DynamicScale().value_and_grad(loss)(params)
    assert error.value.code == "GS106"
    assert str(error.value).startswith(
        f"The gradient of {name} is float0. It carries no derivative, so it can "
        "neither be unscaled nor be checked. Do not differentiate with respect to this "
        "leaf"
    )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_anywhere_makes_a_step_not_finite(bad):
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    factors = {"a": jnp.ones(3), "b": jnp.ones((2, 2)).at[1, 0].set(bad)}

    def loss(params):
        products = jax.tree.map(lambda a, b: (a * b).sum(), params, factors)
        return sum(jax.tree.leaves(products))

    assert not ours.DynamicScale().value_and_grad(loss)(params).finite


# --- replicas -------------------------------------------------------------------------


def replica(dynamic_scale, weight, batch):
    return dynamic_scale.value_and_grad(product, axis_name="batch")(weight, batch)


BATCHES = pytest.mark.parametrize(
    "batches", [[1.0, 2.0, 6.0], [1.0, math.inf, 6.0]], ids=["finite", "overflow"]
)


@BATCHES
def test_replicas_agree_as_in_flax(batches):
    def run(library):
        first = library.DynamicScale(scale=jnp.float32(2.0**16))
        step = jax.vmap(replica, in_axes=(None, None, 0), axis_name="batch")
        kept, ok, _, grad = step(first, jnp.float32(1.0), jnp.array(batches))
        return kept.scale.tolist(), ok.tolist(), grad.tolist()

    mine = run(ours)
    assert mine == run(theirs)
    assert [len(set(each)) for each in mine] == [1, 1, 1]


ON_TWO_DEVICES = """
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from gradscale.jax.flax import DynamicScale

def step(dynamic_scale, weight, batch):
    step = dynamic_scale.value_and_grad(lambda w, b: (w * b).mean(), axis_name="batch")
    return step(weight, batch)

whole, split = PartitionSpec(), PartitionSpec("batch")
sharded = jax.shard_map(
    step,
    mesh=Mesh(jax.devices(), ("batch",)),
    in_specs=(whole, whole, split),
    out_specs=whole,
    check_vma=False,
)
mapped = jax.pmap(step, axis_name="batch", in_axes=(None, None, 0), out_axes=None)
for batch in ([1.0, 3.0], [1.0, float("inf")]):
    given = DynamicScale(), jnp.float32(1.0), jnp.array(batch)
    for result in (sharded(*given), mapped(*given)):
        kept = result.dynamic_scale
        print(result.grad, result.finite, kept.scale, kept.fin_steps)
"""


def test_two_devices_take_or_leave_out_a_step_together():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
    assert done.stdout.splitlines() == [
        "2.0 True 65536.0 1",
        "2.0 True 65536.0 1",
        "inf False 32768.0 0",
        "inf False 32768.0 0",
    ], done.stderr


# --- leaves and structure -------------------------------------------------------------


def test_the_leaves_are_strongly_typed():
    leaves = jax.tree.leaves(ours.DynamicScale(scale=1024.0))
    kinds = [(leaf.dtype.name, leaf.weak_type) for leaf in leaves]
    assert kinds == [("int32", False), ("float32", False)]


def test_two_scales_do_not_share_what_is_donated():
    step = jax.jit(lambda kept: kept.replace(scale=kept.scale / 2), donate_argnums=0)
    assert step(ours.DynamicScale()).scale == step(ours.DynamicScale()).scale == 2.0**15


def test_the_axes_of_an_ensemble_can_be_named_by_a_tree():
    first = ours.DynamicScale(growth_interval=1)
    members = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), first)
    axes = jax.tree.map(lambda _: 0, members)
    assert (axes.fin_steps, axes.scale) == (0, 0)
    step = jax.vmap(
        lambda kept, batch: kept.value_and_grad(product)(1.0, batch), in_axes=(axes, 0)
    )
    result = step(members, jnp.array([1.0, math.inf]))
    assert result.dynamic_scale.scale.tolist() == [2.0**17, 2.0**15]


@pytest.mark.parametrize(
    "placeholder", [object(), None, 0, "name"], ids=["object", "None", "0", "name"]
)
def test_the_leaves_may_be_whatever_jax_puts_there(placeholder):
    structure = jax.tree.structure(ours.DynamicScale())
    filled = jax.tree.unflatten(structure, [placeholder] * 2)
    assert (filled.fin_steps, filled.scale) == (placeholder, placeholder)


def test_a_scan_gives_the_scales_of_a_loop():
    first = ours.DynamicScale(growth_interval=2)
    batches = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0]

    def step(kept, batch):
        kept = kept.value_and_grad(product)(jnp.float32(0.5), batch).dynamic_scale
        return kept, kept.scale

    _, told = jax.lax.scan(step, first, jnp.array(batches))
    assert told.tolist() == scales(walk(first, batches))


# --- saving ---------------------------------------------------------------------------

SETTINGS = {"growth_interval": 7, "minimum_scale": 0.5, "flax_count": True}
WAYS = {
    "state dict": lambda kept: serialization.from_state_dict(
        ours.DynamicScale(**SETTINGS), serialization.to_state_dict(kept)
    ),
    "msgpack": lambda kept: serialization.from_bytes(
        ours.DynamicScale(**SETTINGS), serialization.to_bytes(kept)
    ),
    "pickle": lambda kept: pickle.loads(pickle.dumps(kept)),
    "deepcopy": copy.deepcopy,
    "jit": jax.jit(lambda kept: kept),
}


@pytest.mark.parametrize("way", WAYS)
def test_everything_survives(way):
    batches = [1.0, math.inf, 1.0, 1.0]
    first = walk(ours.DynamicScale(**SETTINGS), batches)[-1].dynamic_scale
    kept = WAYS[way](first)
    assert kept == first
    assert scales(walk(kept, batches * 3)) == scales(walk(first, batches * 3))


def test_a_restored_scale_does_not_make_a_step_be_traced_again():
    step, traced = counted()
    first = walk(ours.DynamicScale(**SETTINGS), [1.0], step=step)[-1].dynamic_scale
    walk(WAYS["msgpack"](first), [1.0], step=step)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("writer", "reader"), [(ours, theirs), (theirs, ours)], ids=["to flax", "from flax"]
)
def test_a_checkpoint_can_be_moved(writer, reader):
    saved = serialization.to_bytes(writer.DynamicScale(fin_steps=3, scale=1024.0))
    loaded = serialization.from_bytes(reader.DynamicScale(), saved)
    assert (int(loaded.fin_steps), float(loaded.scale)) == (3, 1024.0)


class State(TrainState):
    dynamic_scale: ours.DynamicScale


def test_a_train_state_leaves_out_a_step_that_is_not_finite():
    @jax.jit
    def step(state, batch):
        kept, ok, _, grads = state.dynamic_scale.value_and_grad(state.apply_fn)(
            state.params, batch
        )
        moved = state.apply_gradients(grads=grads)
        chosen = jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, state)
        return chosen.replace(dynamic_scale=kept)

    state = State.create(
        apply_fn=lambda params, batch: (params["w"] * batch).sum(),
        params={"w": jnp.ones(2)},
        tx=optax.sgd(0.5, momentum=0.9),
        dynamic_scale=ours.DynamicScale(growth_interval=1),
    )
    after = step(state, jnp.ones(2))
    skipped = step(after, jnp.array([1.0, math.inf]))
    assert after.params["w"].tolist() == skipped.params["w"].tolist() == [0.5, 0.5]
    assert (int(after.step), int(skipped.step)) == (1, 1)
    told = [float(each.dynamic_scale.scale) for each in (after, skipped)]
    assert told == [2.0**17, 2.0**16]
