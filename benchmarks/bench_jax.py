"""Time a compiled JAX update: check, unscale, clip at 1.0, AdamW, next scale.

The implementations take turns in one run, each with its own parameters and state, which
are donated to every step, all with the same gradients. Times are per step over several
consecutive steps; a ratio is the median of the ratios of paired turns. "ahead" is the
same step called through `jit(...).lower(...).compile()`. "device" is the total time of
one step's kernels, "kernels" their number, "reads" how often a gradient is read.
"queued" is the time of steps that the host enqueued while the device was busy, as in
training, where forward and backward pass come first.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.models import gpt2_shapes
from benchmarks.record import jax_place, quantiles, result, write
from gradscale import DynamicScale
from gradscale.jax import loss_scaled

MAX_NORM = 1.0
SCALE = 1024.0
STEPS = 5
SETS = {
    "gpt2-124M": gpt2_shapes(),
    "gpt2-xl-1.56B": gpt2_shapes(1600, 48),
    "tiny": gpt2_shapes(8, 1),
}
BASE = "clip and AdamW, no scaling"
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def adamw() -> optax.GradientTransformation:
    """Return the optimizer of every implementation."""
    return optax.adamw(1e-5)


def clipped() -> optax.GradientTransformation:
    """Return clip and AdamW by optax."""
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw())


def optimizer_step(optimizer: optax.GradientTransformation) -> tuple[Any, Step]:
    """Return (init, step) of an optimizer."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer.init, step


def flax_step() -> tuple[Any, Step]:
    """Return (init, step) as in flax's DynamicScale and its examples."""
    optimizer = clipped()

    def init(params: Any) -> Any:
        return optimizer.init(params), jnp.float32(SCALE), jnp.int32(0)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        inner, scale, count = state
        grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32) / scale, grads)
        finite = jnp.array(True)
        for grad in jax.tree.leaves(grads):
            finite &= jnp.all(jax.lax.is_finite(grad))
        grow = count == 2000
        grown = jnp.where(grow & finite, scale * 2.0, scale)
        scale = jnp.where(finite, grown, scale * 0.5)
        count = jnp.where(grow | ~finite, 0, count + 1)
        updates, moved = optimizer.update(grads, inner, params)

        def select(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        applied = optax.apply_updates(params, updates)
        return select(applied, params), (select(moved, inner), scale, count)

    return init, step


def contestants() -> dict[str, tuple[Any, Step]]:
    """Return (init, step) of every implementation."""
    policy = DynamicScale(init_scale=SCALE)
    return {
        BASE: optimizer_step(clipped()),
        "flax way": flax_step(),
        "gradscale": optimizer_step(loss_scaled(adamw(), policy, max_norm=MAX_NORM)),
    }


def arrays(shapes: list[tuple[int, ...]], seed: int) -> dict[str, jax.Array]:
    """Return normal arrays of these shapes, with names that sort in order."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        f"p{i:04}": 0.02 * jax.random.normal(key, shape)
        for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))
    }


class Load:
    """Work for the device, long enough for the host to enqueue several steps."""

    def __init__(self, size: int, products: int) -> None:
        def work(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, products, lambda _, y: (y @ x) / size, x)

        self.x = jnp.ones((size, size), jnp.bfloat16)
        self.work = jax.jit(work)
        jax.block_until_ready(self.start())

    def start(self) -> jax.Array:
        """Enqueue the work without waiting."""
        return self.work(self.x)

    def run(self) -> float:
        """Return the time of the work in seconds."""
        start = time.perf_counter()
        jax.block_until_ready(self.start())
        return time.perf_counter() - start


class Contestant:
    """A compiled step with its own parameters and state."""

    def __init__(self, init: Any, step: Step, shapes: Any, grads: Any) -> None:
        self.params = arrays(shapes, seed=1)
        self.state = jax.jit(init)(self.params)
        self.grads = grads
        self.step = jax.jit(step, donate_argnums=(0, 1))
        start = time.perf_counter()
        self.run()
        self.compile_s = time.perf_counter() - start
        # A hit in the compilation cache that main() sets up.
        self.ahead = self.step.lower(self.params, self.state, grads).compile()
        self.reads = reads_of_gradients(self.ahead.as_text(), len(shapes))

    def run(
        self, steps: int = STEPS, *, ahead: bool = False, before: Load | None = None
    ) -> float:
        """Take some steps and return the time of one in ms.

        Args:
            steps: How many.
            ahead: Use the step compiled ahead of time.
            before: Work enqueued first; its time is subtracted.
        """
        step = self.ahead if ahead else self.step
        jax.block_until_ready((self.params, self.state))
        load_s = before.run() if before else 0.0
        start = time.perf_counter() + load_s
        if before:
            before.start()
        for _ in range(steps):
            self.params, self.state = step(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))
        return 1e3 * (time.perf_counter() - start) / steps


def reads_of_gradients(hlo: str, gradients: int) -> float:
    """Return the mean number of compiled operations that read a gradient.

    >>> text = "ENTRY e {\\n %grads_a = f32[2] parameter(0)\\n"
    >>> text += " %b = f32[2] bitcast(%grads_a)\\n %c = f32[] fusion(%b, %grads_a)\\n}"
    >>> reads_of_gradients(text, 1)
    2.0
    """
    entry = hlo[hlo.index("\nENTRY" if "\nENTRY" in hlo else "ENTRY") :]
    line = re.compile(r"%?([\w.\-]+) = [^=]*? ([a-z\-]+)\((.*)")
    same, reads = set(), 0
    for name, kind, rest in line.findall(entry):
        operands = re.findall(r"%([\w.\-]+)", rest.split("metadata=")[0])
        mine = [o for o in operands if o in same]
        given = kind == "parameter" and name.startswith("grads")
        if given or (kind == "bitcast" and mine):
            same.add(name)
        else:
            reads += len(mine)
    return reads / gradients


def on_device(contestant: Contestant, steps: int = 2) -> dict[str, Any]:
    """Return time and number of a step's kernels from the profiler; {} on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            contestant.run(steps)
        file = next(Path(folder).rglob("perfetto_trace.json.gz"))
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("name") in ("process_name", "thread_name")
    }
    streams = {place for place, name in names.items() if name.startswith("Stream")}
    kernels = [
        e for e in events if e.get("ph") == "X" and (e["pid"], e.get("tid")) in streams
    ]
    if not kernels:
        return {}
    busy = sum(e["dur"] for e in kernels) / 1e3 / steps
    return {"device_ms": busy, "kernels": len(kernels) / steps}


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Time the implementations in turns; return their rows."""
    shapes = SETS[name]
    grads = arrays(shapes, seed=0)
    made = {
        impl: Contestant(init, step, shapes, grads)
        for impl, (init, step) in track(
            contestants().items(), "compile " + name, console=Console(stderr=True)
        )
    }
    # A CPU has no queue: a step runs when it is called.
    load = None if jax.default_backend() == "cpu" else Load(8192, 160)
    times: dict[str, list[float]] = {impl: [] for impl in made}
    ahead: dict[str, list[float]] = {impl: [] for impl in made}
    queued: dict[str, list[float]] = {impl: [] for impl in made}
    for turn in track(range(-1, rounds), name, console=Console(stderr=True)):
        order = list(made)
        # Rotated, so that none always goes first.
        for impl in order[turn % len(order) :] + order[: turn % len(order)]:
            elapsed = made[impl].run(), made[impl].run(ahead=True)
            if turn >= 0:
                times[impl].append(elapsed[0])
                ahead[impl].append(elapsed[1])
                queued[impl].append(made[impl].run(before=load) if load else 0.0)
    return [
        {
            "set": name,
            "impl": impl,
            "dtype": "f32",
            "elements": sum(grad.size for grad in grads.values()),
            "tensors": len(grads),
            "rounds": rounds,
            **quantiles(times[impl]),
            "ratio_to_no_scaling": ratio(times[impl], times[BASE]),
            "ahead_p50": statistics.median(ahead[impl]),
            "ahead_ratio_to_no_scaling": ratio(ahead[impl], ahead[BASE]),
            **in_queue(queued[impl], queued[BASE]),
            **on_device(contestant),
            "reads": contestant.reads,
            "compilations": contestant.step._cache_size(),
            "compile_s": contestant.compile_s,
        }
        for impl, contestant in made.items()
    ]


def in_queue(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the times of enqueued steps; {} on a CPU."""
    if not any(ours):
        return {}
    return {
        "queued_p50": statistics.median(ours),
        "queued_ratio_to_no_scaling": ratio(ours, theirs),
    }


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(record: dict[str, Any]) -> Table:
    """Return the record as a table for the terminal."""
    shown = Table(title=f"Compiled update, ms ({record['device']})")
    head = ("set", "implementation", "p20", "p50", "p80", "ratio", "ahead", "queued")
    for column in (*head, "device", "kernels", "reads"):
        shown.add_column(column, justify="left" if column[0] in "si" else "right")
    for row in record["rows"]:
        numbers = [f"{row[q]:.2f}" for q in ("p20", "p50", "p80")]
        numbers.append(f"{row['ratio_to_no_scaling']:.2f} x")
        numbers.append(f"{row['ahead_p50']:.2f}")
        for field in ("queued_p50", "device_ms", "kernels", "reads"):
            numbers.append(f"{row[field]:.2f}" if field in row else "")
        shown.add_row(row["set"], row["impl"], *numbers)
    return shown


def main() -> None:
    """Measure, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each")
    parser.add_argument(
        "--set", choices=tuple(SETS), action="append", help="only these"
    )
    parser.add_argument(
        "--commit", default="", help="commit to record outside a git checkout"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    args = parser.parse_args()
    names = args.set or ["gpt2-124M", "gpt2-xl-1.56B"]
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        rows = [row for name in names for row in measure(name, args.rounds)]
    record = result("jax", jax_place(), rows, args.commit)
    # The compiled program depends on the flags.
    record["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    write(args.out, record)
    if args.json:
        print(json.dumps(record))
    else:
        Console(width=120).print(table(record))


if __name__ == "__main__":
    main()
