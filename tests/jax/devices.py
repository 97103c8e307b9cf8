"""Eight devices in one process: runs the cases of `test_devices` and writes them down.

Started as `python -m tests.jax.devices GROUP FILE`, with XLA told to make eight devices
of the host. What each case showed goes to FILE as JSON, or why it failed.
"""

import contextlib
import functools
import itertools
import json
import math
import random
import re
import sys
import traceback
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradscale import DynamicScale
from gradscale.core.state import PYTHON, Observed
from gradscale.jax import (
    all_finite,
    current_scale,
    last,
    loss_scaled,
    observe,
    retried_value_and_grad,
    scaled_value_and_grad,
)

COUNT = 8
SEATS = range(COUNT)
STEPS = 40
# Long enough to grow, to back off and to clip, where a step takes long.
SOME = 16
ROWS = 16
# An eighth of the lowest scale times LARGE overflows f16; 3 times the highest does not.
POLICY = DynamicScale(
    init_scale=2.0**10, growth_interval=3, min_scale=2.0**5, max_scale=2.0**12
)
LARGE = 2.0**15
# Among the norms of the steps below, so that some are clipped.
MAX_NORM = 750.0
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
BAD = {"inf": math.inf, "minus-inf": -math.inf, "nan": math.nan}
GROUPS = {"replicas": {}, "shards": {}, "automatic": {}}


def case(group, name, *args, **kwargs):
    """Enter a function, to be called with these arguments, under a name."""

    def enter(function):
        GROUPS[group][name] = functools.partial(function, *args, **kwargs)
        return function

    return enter


# --- what is trained ------------------------------------------------------------------


def first_params():
    """Return parameters that meet every way of reading.

    An eighth of `row` has the shape of `bias`; an eighth of `big` is still large.
    """
    return {
        "table": jnp.full((ROWS, COUNT), 0.5),
        "bias": jnp.full(COUNT, 0.5),
        "row": jnp.full(COUNT * COUNT, 0.5),
        "big": jnp.full((1024, 136), 0.5),
    }


def loss_of(params, batch, gain):
    """Overflow f16, going backward only, in the rows of `table` where gain is LARGE.

    All gradients are small whole numbers over a power of two: exact in any order.

    Args:
        params: As `first_params` made them, or as they became.
        batch: f32[n, ROWS], small whole numbers above 0.
        gain: f32[ROWS], 1 or LARGE.
    """
    half = params["table"].astype(jnp.float16) * gain.astype(jnp.float16)[:, None]
    in_half = (batch @ half.astype(jnp.float32)).sum(1).mean()
    in_full = (params["bias"] * batch[:, :COUNT]).sum(1).mean()
    return (
        in_half + in_full + (params["row"].sum() + params["big"].sum()) * batch.mean()
    )


def batches():
    """Return f32[COUNT, ROWS] for each step of a run."""
    rng = np.random.default_rng(7)
    return np.float32(rng.integers(1, 4, (STEPS, COUNT, ROWS)))


def finite_flags():
    """Return which steps of a run are finite."""
    rng = random.Random(11)
    return [rng.random() > 0.2 for _ in range(STEPS)]


def gains():
    """Return f32[ROWS] for each step of a run."""
    rng = random.Random(13)
    return [
        gain_of(None if finite else rng.randrange(ROWS)) for finite in finite_flags()
    ]


def gain_of(row=None):
    """Return f32[ROWS] that overflows in one row, or in none."""
    gain = np.ones(ROWS, np.float32)
    if row is not None:
        gain[row] = LARGE
    return gain


def expected_scales():
    """Return the scale after each step of a run, by the rule over Python floats."""
    state, scales = POLICY.init_state(), []
    for finite in finite_flags():
        state = POLICY.next_state(state, Observed(finite, 1.0, True), PYTHON.where)
        scales.append(state.scale)
    return scales


def optimizer(axis_name=None):
    # Momentum, so that a skipped step that touched the inner state would show.
    inner = optax.sgd(2.0**-11, momentum=0.5)
    return loss_scaled(inner, POLICY, axis_name=axis_name, max_norm=MAX_NORM)


def walk(step, params, state, steps=STEPS):
    """Return what a run showed: figures of every step, and the weights at its end."""
    shown = []
    for batch, gain in zip(batches()[:steps], gains()[:steps], strict=True):
        params, state, seen = step(params, state, batch, gain)
        # Here, before the next one starts: eight devices share few cores.
        shown.append(plain(seen))
    return {
        "scales": [seen["scale"] for seen in shown],
        "applied": [seen["applied"] for seen in shown],
        "norms": [seen["norm"] for seen in shown],
        "weights": weights_of(params),
    }


def figures(state):
    """Return what a step showed, on the devices."""
    step = last(state)
    # JSON has no inf, and an overflow leaves no norm.
    norm = jnp.where(step.applied, step.grad_norm, 0.0)
    return {
        "scale": current_scale(state),
        "applied": step.applied,
        "norm": norm,
        "retried": state.retried_steps,
    }


def plain(seen):
    """Return arrays as numbers and lists."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), seen)


def weights_of(params):
    """Return parameters as lists; of the big one, some elements of every shard."""
    held = {name: np.asarray(leaf) for name, leaf in params.items()}
    return plain({**held, "big": held["big"][..., ::64, ::17]})


@functools.cache
def run_alone(steps):
    """Return what the run shows on one device."""
    made = optimizer()
    params = first_params()
    return walk(jax.jit(step_by(made)), params, made.init(params), steps)


def step_by(made):
    def step(params, state, batch, gain):
        value, grads = scaled_value_and_grad(loss_of)(state, params, batch, gain)
        updates, state = made.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, figures(state)

    return step


def unchanged(one, other):
    """Return True if two trees are equal, element for element."""
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def collectives_in(compiled):
    """Return how often a program calls each collective."""
    text = compiled.as_text()
    return {
        name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES
    }


def aliases_in(compiled):
    """Return how many inputs a program reuses for its outputs."""
    return len(re.findall(r"\{\}, \w+-alias\)", compiled.as_text().split("\n")[0]))


def read_as_on_gpu():
    """Let gradients be read by the reductions that only a GPU is fast at."""
    return mock.patch.object(jax, "default_backend", return_value="gpu")


# --- pmap -----------------------------------------------------------------------------


@functools.cache
def mapped_step(reduced, axis_name):
    made = optimizer(axis_name)

    def step(params, state, batch, gain):
        _, grads = scaled_value_and_grad(loss_of)(state, params, batch, gain)
        grads = lax.pmean(grads, "d") if reduced else grads
        updates, state = made.update(grads, state, params)
        return optax.apply_updates(params, updates), state, figures(state)

    return jax.pmap(step, axis_name="d")


@functools.cache
def replicas():
    """Return parameters and state, once for each device."""
    params = first_params()
    given = params, optimizer().init(params)
    return jax.tree.map(lambda leaf: np.stack([leaf] * COUNT), given)


def one_bad_replica(seat, reduced, axis_name):
    """Take a step in which one replica overflows; return what became of each."""
    step = mapped_step(reduced, axis_name)
    gain = np.stack([gain_of(3 if seat == other else None) for other in SEATS])
    batch = np.ones((COUNT, 1, ROWS), np.float32)
    params, _, seen = step(*replicas(), batch, gain)
    return plain({**seen, "weights": params["row"][:, 0]})


for _seat in SEATS:
    case("replicas", f"mean-{_seat}", _seat, True, "d")(one_bad_replica)
    case("replicas", f"agreed-{_seat}", _seat, False, "d")(one_bad_replica)
    case("replicas", f"apart-{_seat}", _seat, False, None)(one_bad_replica)


@case("replicas", "run")
def run_of_replicas():
    mapped = mapped_step(True, "d")

    def step(params, state, batch, gain):
        return mapped(params, state, batch[:, None], np.stack([gain] * COUNT))

    return walk(step, *replicas())


def half_product(weight, x):
    """Overflow f16 where the scale times x is above its range."""
    return (weight.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)


@case("replicas", "retry")
def retry_of_replicas():
    """Let one replica overflow twice; return how often each tried again."""
    policy = DynamicScale(init_scale=2.0**10)
    made = loss_scaled(optax.sgd(0.5), policy, axis_name="d")
    retried = retried_value_and_grad(half_product, policy, retries=9, axis_name="d")

    def step(weight, state, x):
        _, grad, state = retried(state, weight, x)
        updates, state = made.update(lax.pmean(grad, "d"), state, weight)
        return weight + updates, figures(state)

    weight = jnp.ones(COUNT)
    x = np.ones(COUNT, np.float32)
    x[5] = 2.0**7
    mapped = jax.pmap(step, axis_name="d")
    weight, seen = mapped(weight, jax.vmap(made.init)(weight), x)
    return plain({**seen, "weights": weight})


# --- shard_map ------------------------------------------------------------------------

LINE = {"table": P("d"), "bias": P(), "row": P("d"), "big": P("d")}
GRID = {
    "table": P("model"),
    "bias": P(),
    "row": P(("data", "model")),
    "big": P("data", "model"),
}


def line_mesh(kind=AxisType.Auto):
    return Mesh(jax.devices(), ("d",), axis_types=(kind,))


def grid_mesh(kind=AxisType.Auto):
    devices = np.reshape(jax.devices(), (4, 2))
    return Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def gathered(params, layout):
    """Return the whole parameters, on each device, from its shards."""

    def whole(leaf, spec):
        for axis, names in enumerate(spec):
            if names is not None:
                leaf = lax.all_gather(leaf, names, axis=axis, tiled=True)
        return leaf

    return {name: whole(leaf, layout[name]) for name, leaf in params.items()}


def layout_of(state, params, layout):
    """Return the layout of an optimizer's state: that of the parameters inside it."""
    shapes = {leaf.shape: layout[name] for name, leaf in params.items()}
    return jax.tree.map(lambda leaf: shapes.get(leaf.shape, P()), state)


def sharded(name, *, agree=True, check_vma=True, gpu=False):
    """Return a compiled step on shards, and the parameters and state to start from."""
    return _sharded(name, agree, check_vma, gpu)


@functools.cache
def _sharded(name, agree, check_vma, gpu):
    mesh, layout, batch = {
        "line": (line_mesh(), LINE, P("d")),
        "grid": (grid_mesh(), GRID, P("data")),
    }[name]
    axes = mesh.axis_names
    made = optimizer(axes if agree else None)
    params = first_params()
    state = made.init(params)

    def local(params, state, batch, gain):
        def share(params):
            # Gradients are summed over all devices.
            return loss_of(gathered(params, layout), batch, gain) / COUNT

        value, grads = scaled_value_and_grad(share)(state, params)
        # On a grid, a loss that JAX knows to vary over one of the axes only.
        value = lax.psum(value, axes[1:]) if axes[1:] else value
        mine = all_finite(grads).reshape(1)
        updates, state = made.update(grads, state, params, value=value)
        seen = {**figures(state), "mine": mine}
        return optax.apply_updates(params, updates), state, seen

    specs = layout, layout_of(state, params, layout)
    shown = {**dict.fromkeys(figures(state), P()), "mine": P(axes)}
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*specs, batch, P()),
        out_specs=(*specs, shown),
        check_vma=check_vma,
    )
    given = place((params, state), mesh, specs)
    step = jax.jit(mapped, donate_argnums=(0, 1))
    with read_as_on_gpu() if gpu else contextlib.nullcontext():
        return step.lower(*given, batches()[0], gain_of()).compile(), given


def place(tree, mesh, specs):
    """Return a copy of a tree, laid out over a mesh."""
    return jax.tree.map(
        lambda leaf, spec: jnp.copy(jax.device_put(leaf, NamedSharding(mesh, spec))),
        tree,
        specs,
    )


def copied(tree):
    """Return a tree that may be donated without loss of the other."""
    return jax.tree.map(jnp.copy, tree)


def one_bad_shard(seat, check_vma):
    """Take a good step, then one with an overflow in one shard of one array."""
    step, given = sharded("line", check_vma=check_vma)
    params, state, _ = step(*copied(given), batches()[0], gain_of())
    before = copied((params, state.inner))
    bad = gain_of(seat * ROWS // COUNT)
    params, state, seen = step(params, state, batches()[1], bad)
    kept = unchanged((params, state.inner), before)
    return {**plain(seen), "unchanged": kept}


for _seat in SEATS:
    case("shards", f"tracked-{_seat}", _seat, True)(one_bad_shard)
    case("shards", f"untracked-{_seat}", _seat, False)(one_bad_shard)


@case("shards", "run-line", "line", STEPS)
@case("shards", "run-grid", "grid", SOME)
@case("shards", "run-line-gpu", "line", SOME, gpu=True)
def run_of_shards(name, steps, gpu=False):
    step, given = sharded(name, gpu=gpu)
    return walk(step, *copied(given), steps)


@case("shards", "alone")
def shards_without_agreement():
    try:
        sharded("line", agree=False)
    except ValueError as error:
        return {"error": str(error)}
    return {}


@case("shards", "donation-line", "line")
@case("shards", "donation-grid", "grid")
def donation_of_shards(name):
    step, given = sharded(name)
    old = copied(given)
    jax.block_until_ready(step(*old, batches()[0], gain_of()))
    return donation_in(step, old)


def donation_in(step, old):
    leaves = jax.tree.leaves(old)
    deleted = sum(leaf.is_deleted() for leaf in leaves)
    return {"leaves": len(leaves), "aliased": aliases_in(step), "deleted": deleted}


@case("shards", "retry-tracked", True)
@case("shards", "retry-untracked", False)
def retry_of_shards(check_vma):
    """Let one shard overflow twice; return how often the batch was tried again."""
    policy = DynamicScale(init_scale=2.0**10)
    made = loss_scaled(optax.sgd(0.5), policy, axis_name="d")
    weight = jnp.ones(COUNT)

    def loss(weight, x):
        return half_product(lax.all_gather(weight, "d", tiled=True), x).sum() / COUNT

    def local(weight, state, x):
        retried = retried_value_and_grad(loss, policy, retries=9, axis_name="d")
        _, grad, state = retried(state, weight, x)
        updates, state = made.update(grad, state, weight)
        return weight + updates, figures(state)

    step = jax.shard_map(
        local,
        mesh=line_mesh(),
        in_specs=(P("d"), P(), P()),
        out_specs=(P("d"), P()),
        check_vma=check_vma,
    )
    x = np.ones(COUNT, np.float32)
    x[5] = 2.0**10
    weight, seen = jax.jit(step)(weight, made.init(weight), x)
    return plain({**seen, "weights": weight})


@case("shards", "partly-manual-cpu", gpu=False)
@case("shards", "partly-manual-gpu", gpu=True)
def partly_manual(gpu):
    """Read gradients of which one axis is mapped and one is left to the compiler."""
    mesh = grid_mesh()

    def local(grads):
        return observe(grads, axis_name="data")[:3]

    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"),),
        out_specs=P(),
        axis_names={"data"},
    )
    grads = jnp.ones((1024, 136)).at[700, 100].set(8.0)
    grads = jax.device_put(grads, NamedSharding(mesh, P("data", "model")))
    with read_as_on_gpu() if gpu else contextlib.nullcontext():
        compiled = jax.jit(step).lower(grads).compile()
    finite, amax, norm = compiled(grads)
    return {
        "finite": bool(finite),
        "amax": float(amax),
        "norm": float(norm),
        "collectives": collectives_in(compiled),
    }


# --- automatic sharding ---------------------------------------------------------------

LAYOUTS = {
    "first": (line_mesh, dict.fromkeys(first_params(), P("d")), P()),
    "last": (line_mesh, {**LINE, "table": P(None, "d"), "big": P(None, "d")}, P()),
    "both": (grid_mesh, {**GRID, "table": P("data", "model")}, P()),
    "batch": (line_mesh, dict.fromkeys(first_params(), P()), P("d")),
    "first-and-batch": (line_mesh, LINE, P("d")),
}


LENGTHS = {**dict.fromkeys(LAYOUTS, SOME), "first-and-batch": STEPS}


@functools.cache
def automatic(name):
    """Return a compiled step that XLA spreads out, and what to start it from."""
    make_mesh, layout, batch_layout = LAYOUTS[name]
    mesh = make_mesh()
    made = optimizer()
    params = first_params()
    state = made.init(params)
    specs = layout, layout_of(state, params, layout)
    given = place((params, state), mesh, specs)
    batch = place(batches()[0], mesh, batch_layout)
    # Else XLA may lay out a result in another way than what was given.
    kept = *jax.tree.map(lambda leaf: leaf.sharding, given), None
    step = jax.jit(step_by(made), donate_argnums=(0, 1), out_shardings=kept)
    return step.lower(*given, batch, gain_of()).compile(), given


def automatic_run(name):
    step, given = automatic(name)
    return walk(step, *copied(given), LENGTHS[name])


def automatic_donation(name):
    step, given = automatic(name)
    old = copied(given)
    jax.block_until_ready(step(*old, batches()[0], gain_of()))
    return donation_in(step, old)


@functools.cache
def reader(name):
    """Return a compiled `observe`, and gradients of ones for it."""
    mesh, layout, _ = LAYOUTS[name]
    grads = jax.tree.map(jnp.ones_like, first_params())
    grads = place(grads, mesh(), layout)
    return jax.jit(observe).lower(grads).compile(), grads


def read_collectives(name):
    compiled, grads = reader(name)
    return {**collectives_in(compiled), "finite": bool(compiled(grads).finite)}


def update_collectives(name):
    _, (params, state) = automatic(name)
    compiled = jax.jit(optimizer().update).lower(params, state, params).compile()
    return collectives_in(compiled)


def one_bad_element(name, leaf, word, seat):
    """Read gradients of which one element on one device is bad."""
    compiled, grads = reader(name)
    values, layout = np.array(grads[leaf]), grads[leaf].sharding
    index = list(layout.devices_indices_map(values.shape).values())[seat]
    values[tuple(part.start or 0 for part in index)] = BAD[word]
    bad = jax.device_put(values, layout)
    seen = compiled({**grads, leaf: bad})
    return {
        "finite": bool(seen.finite),
        "culprits": [n for n, p in plain(seen.peaks).items() if not math.isfinite(p)],
        "bad_shards": [
            shard.device.id
            for shard in bad.addressable_shards
            if not np.isfinite(shard.data).all()
        ],
    }


def bad_elements():
    """Return (layout, leaf, word, seat): each leaf bad on each device, in each layout.

    The words take turns: each meets each layout, each leaf and each device.
    """
    layouts, leaves, words = ("first", "last", "both"), ("table", "big"), list(BAD)
    return [
        (layout, leaf, words[(i + j + seat) % len(words)], seat)
        for i, layout in enumerate(layouts)
        for j, leaf in enumerate(leaves)
        for seat in SEATS
    ]


for _name in LAYOUTS:
    case("automatic", f"run-{_name}", _name)(automatic_run)
    case("automatic", f"donation-{_name}", _name)(automatic_donation)
for _name in ("first", "last", "both"):
    case("automatic", f"observe-{_name}", _name)(read_collectives)
for _place in bad_elements():
    case("automatic", "-".join(map(str, _place)), *_place)(one_bad_element)


case("automatic", "update-both", "both")(update_collectives)


@case("automatic", "gathering")
def gathering():
    """Gather on purpose: the count must show it."""
    mesh = line_mesh()
    values = jax.device_put(jnp.ones(16), NamedSharding(mesh, P("d")))
    gathered = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P()))
    return collectives_in(gathered.lower(values).compile())


def mixed_layouts(kind, shape):
    """Read and apply gradients of one shape that lie on the devices in three ways."""
    mesh = line_mesh(kind)
    layout = {"a": P("d", None), "b": P(None, "d"), "c": P(None, None)}
    grads = place({name: jnp.ones(shape) for name in layout}, mesh, layout)
    made = optimizer()

    def read_and_update(grads):
        _, state = made.update(grads, made.init(grads), grads)
        return observe(grads).norm, last(state).applied

    with jax.set_mesh(mesh):
        compiled = jax.jit(read_and_update).lower(grads).compile()
        norm, applied = compiled(grads)
    return {
        "norm": float(norm),
        "applied": bool(applied),
        "collectives": collectives_in(compiled),
    }


for _kind, (_size, _shape) in itertools.product(
    ("Auto", "Explicit"), {"small": (16, 8), "large": (1024, 136)}.items()
):
    case("automatic", f"mixed-{_kind}-{_size}", AxisType[_kind], _shape)(mixed_layouts)


# --- the process ----------------------------------------------------------------------


def main(group, file):
    shown = {}
    for name, run in GROUPS[group].items():
        try:
            shown[name] = run()
        except Exception:
            shown[name] = {"failed": traceback.format_exc()}
        # After each case: a crash must not take the others along.
        Path(file).write_text(json.dumps(shown), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
