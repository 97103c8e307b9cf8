"""Time a compiled TensorFlow step of Keras: check, unscale, AdamW, next scale.

Ours, Keras' own `LossScaleOptimizer` and bare AdamW take turns in one run, each with
its own variables, all with the same gradients. A ratio is the median of the ratios of
paired turns.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from benchmarks.record import Place, quantiles, result, write
from gradscale.keras import LossScaleOptimizer

KERAS_OWN = "keras.optimizers.LossScaleOptimizer"
OURS = "gradscale.keras.LossScaleOptimizer"
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "AdamW, no scaling": lambda inner: inner,
    KERAS_OWN: keras.optimizers.LossScaleOptimizer,
    OURS: LossScaleOptimizer,
}
SETS = {"64x256x256": [(256, 256)] * 64, "tiny": [(8, 8)] * 2}


def steps(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """Return one compiled step of each implementation."""
    made = np.random.default_rng(0)
    grads = [tf.constant(made.normal(size=s).astype("float32")) for s in shapes]
    return {name: _step(wrap, grads) for name, wrap in WRAPPERS.items()}


def _step(wrap: Callable[[Any], Any], grads: list[tf.Tensor]) -> Callable[[], object]:
    variables = [keras.Variable(np.ones(g.shape, "float32")) for g in grads]
    optimizer = wrap(keras.optimizers.AdamW(1e-5))
    optimizer.build(variables)

    @tf.function
    def step() -> None:
        # Read from memory, as gradients are.
        optimizer.apply([tf.identity(g) for g in grads], variables)

    return step


def turns(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, list[float]]:
    """Return ms of each implementation, turn by turn."""
    implementations = steps(shapes)
    for step in implementations.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in implementations}
    for turn in range(rounds):
        order = list(implementations)
        for name in order if turn % 2 else reversed(order):
            start = time.perf_counter()
            implementations[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def rows(names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return one row for each implementation and set."""
    found = []
    for name in names:
        times = turns(SETS[name], rounds)
        for impl, taken in times.items():
            paired = zip(taken, times[KERAS_OWN], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in paired)
            row = {"impl": impl, "set": name, "turns": rounds}
            found.append({**row, **quantiles(taken), "ratio to Keras' own": ratio})
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", choices=SETS, dest="sets")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    measured = rows(options.sets or ["64x256x256"], options.rounds)
    versions = {"keras": keras.__version__, "tensorflow": tf.__version__}
    place = Place(f"CPU, {os.cpu_count()} cores", versions)
    table = Table("implementation", "set", "p50 ms", "to Keras' own")
    for row in measured:
        ratio = format(row["ratio to Keras' own"], ".2f")
        table.add_row(row["impl"], row["set"], f"{row['p50']:.2f}", ratio)
    Console().print(table)
    if options.out is not None:
        write(options.out, result("keras", place, measured))


if __name__ == "__main__":
    main()
