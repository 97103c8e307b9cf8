"""Time the host: how long it takes to enqueue a step of many small tensors.

Everything after backward (check, unscale, clip at 1.0, AdamW, next scale) for an
increasing number of tensors of 256 elements, whose gradients are new tensors in every
step, as after zero_grad(). On a GPU the device is kept busy, so that the host never
waits for it; on a CPU, which does the work itself, only the ratios are meaningful.
"""

import gc
from typing import Any

import torch

from benchmarks.command import add_only, parser_for, save, show
from benchmarks.contestants import (
    BARE,
    FUSED,
    OWN,
    STEP,
    TORCH,
    Optimizers,
    chosen,
    enter,
)
from benchmarks.timing import Queue, Stopwatch, in_order, in_turns, queue_of, ratio

ELEMENTS = 256
COUNTS = (10, 100, 1000, 4000, 10000)
HOST = {name: STEP[name] for name in (TORCH, FUSED, OWN, BARE)}

COLUMNS = {
    "tensors": "tensors",
    "implementation": "impl",
    "p20": "p20",
    "p50": "p50",
    "p80": "p80",
    "µs a tensor": "us_per_tensor",
    "× torch": "ratio_to_torch",
    "× bare": "ratio_to_bare",
    "waits": "waits",
}


def measure(
    count: int, device: str, rounds: int, only: list[str] | None, queue: Queue | None
) -> list[dict[str, Any]]:
    """Time the implementations in turn on this many tensors; return their rows."""
    torch.manual_seed(0)
    params = [torch.randn(ELEMENTS, device=device) for _ in range(count)]
    pristine = [torch.randn_like(param) for param in params]
    for param in params:
        param.requires_grad_()

    def renew() -> None:
        # Allocated before the old ones are freed, so that the addresses differ.
        for param, grad in zip(params, torch._foreach_mul(pristine, 1.0), strict=True):
            param.grad = grad

    optimizers = Optimizers(params)
    watches = {}
    for name, who in chosen(HOST, only).items():
        entered = enter(who, params, optimizers, device)
        prepare = in_order(renew, entered.scale)
        watches[name] = Stopwatch(entered.step, prepare, device, queue, clock="host")
        watches[name].warm_up()
    for name in in_turns(list(watches), rounds, f"{count} tensors"):
        watches[name].take()
    return [row_of(name, watches, count) for name in watches]


def row_of(name: str, watches: dict[str, Stopwatch], count: int) -> dict[str, Any]:
    """Return the row of one implementation."""
    watch = watches[name]
    row = {
        "impl": name,
        "dtype": "f32",
        "elements": count * ELEMENTS,
        "tensors": count,
        "rounds": len(watch.main()),
        **watch.figures(),
    }
    row["us_per_tensor"] = 1e3 * row["p50"] / count
    for field, base in (("ratio_to_torch", TORCH), ("ratio_to_bare", BARE)):
        if base in watches:
            row[field] = ratio(watch.main(), watches[base].main())
    return row


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "host", rounds=15)
    parser.add_argument(
        "--count",
        type=int,
        action="append",
        help=f"tensors; may be repeated; by default {COUNTS}, on a CPU up to 1000",
    )
    add_only(parser, HOST)
    args = parser.parse_args(arguments)
    queue = queue_of(args.device)
    counts = [n for n in COUNTS if args.device == "cuda" or n <= 1000]
    rows: list[dict[str, Any]] = []
    for count in args.count or counts:
        rows += measure(count, args.device, args.rounds, args.only, queue)
        save(args, "host", rows)
        gc.collect()
    show(args, "host", rows, COLUMNS, "Host time of a step, ms")


if __name__ == "__main__":
    main()
