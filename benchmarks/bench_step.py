"""Time everything after backward: check, unscale, clip at 1.0, AdamW, next scale.

The implementations take turns in one run on the same parameters and gradients, so that
their ratios are meaningful even on a shared machine; a ratio is the median of the
ratios of paired turns. On a GPU three clocks are read:

  device  between two events, on a device that is kept busy while the host enqueues the
          step, as the backward pass does in training; p50 is of this clock
  wall    of a step on an idle device, host included; on a CPU p50 is of this clock
  host    until the host has enqueued the step, never waiting for the device

"waits" marks an implementation whose host waits for the device within a step. The floor
is the time of the unavoidable memory traffic at the bandwidth of a plain copy, measured
in the same run: 32 bytes per parameter, or 30 for f16 with f32 masters (one read of the
gradients to check them, one pass of AdamW). It is meaningless on a CPU, whose
caches serve part of the traffic. Memory is that of the scaler alone, as a share of the
parameters.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import add_only, parser_for, save, show
from benchmarks.contestants import (
    BARE,
    FUSED,
    OWN,
    STEP,
    TORCH,
    Contestant,
    Optimizers,
    chosen,
    enter,
)
from benchmarks.memory import Meter
from benchmarks.models import gpt2_shapes, llama_shapes
from benchmarks.timing import (
    Queue,
    Step,
    Stopwatch,
    bytes_per_ms,
    in_order,
    in_turns,
    queue_of,
    ratio,
)


@dataclass(frozen=True)
class Set:
    """Tensors to step.

    Attributes:
        shapes: One for each parameter.
        dtype: Of parameters and gradients.
        floor_bytes: Minimum number of bytes read and written per parameter.
    """

    shapes: list[tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    floor_bytes: int = 32


SETS = {
    "gpt2-124M": Set(gpt2_shapes()),
    "gpt2-xl-1.56B": Set(gpt2_shapes(1600, 48)),
    "llama-1.24B": Set(llama_shapes()),
    "adapters-4000x1024": Set([(1024,)] * 4000),
    "halves-1.24B": Set(llama_shapes(), torch.float16, 30),
    "tiny": Set(gpt2_shapes(8, 1)),
    "tiny-halves": Set(gpt2_shapes(8, 1), torch.float16, 30),
}
ON_CPU = ("gpt2-124M", "adapters-4000x1024")
ON_GPU = (*ON_CPU, "gpt2-xl-1.56B", "llama-1.24B", "halves-1.24B")
# Beside the bare step, the gradients are read once for the check and written back by
# torch's fused AdamW: 4 + 4 bytes.
EXTRA_OF_FUSED = 8

COLUMNS = {
    "set": "set",
    "implementation": "impl",
    "p50": "p50",
    "wall": "wall_p50",
    "host": "host_p50",
    "× floor": "ratio_to_floor",
    "× torch": "ratio_to_torch",
    "× bare": "ratio_to_bare",
    "memory": "memory_share",
    "waits": "waits",
}


def measure(
    name: str,
    device: str,
    rounds: int,
    only: Iterable[str] | None,
    queue: Queue | None,
    bandwidth: float,
) -> list[dict[str, Any]]:
    """Time the implementations in turns; return their rows.

    Args:
        name: Of the set.
        device: "cpu" or "cuda".
        rounds: Timed turns of each implementation.
        only: Names of implementations; by default all that support the set.
        queue: The GPU's.
        bandwidth: Bytes per ms, for the floor.
    """
    tensors = SETS[name]
    # Torch's scaler refuses f16 gradients, and torch's AdamW keeps no masters.
    able = STEP if tensors.dtype is torch.float32 else {OWN: STEP[OWN]}
    everyone = chosen(able, only)
    if not everyone:
        return []
    torch.manual_seed(0)
    params = [torch.randn(s, device=device).to(tensors.dtype) for s in tensors.shapes]
    pristine = [torch.randn_like(param) for param in params]
    grads = [torch.empty_like(param) for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.requires_grad_().grad = grad

    def restore() -> None:
        # For all, though bare and own AdamW do not write gradients: the device caches
        # are then in the same state for each implementation.
        torch._foreach_copy_(grads, pristine)

    watches, memory = enter_all(everyone, params, restore, device, queue)
    for impl in in_turns(list(watches), rounds, name):
        watches[impl].take()
    elements = sum(param.numel() for param in params)
    floor = tensors.floor_bytes * elements / bandwidth
    same = {
        "set": name,
        "dtype": "f32" if tensors.dtype is torch.float32 else "f16",
        "elements": elements,
        "tensors": len(params),
        "rounds": rounds,
        "floor_ms": floor,
    }
    extra = EXTRA_OF_FUSED * elements / bandwidth
    return [
        {"impl": impl, **same, **watch.figures(), **memory[impl]}
        | compared(impl, watches, floor, extra)
        for impl, watch in watches.items()
    ]


def enter_all(
    everyone: dict[str, Contestant],
    params: list[Tensor],
    restore: Step,
    device: str,
    queue: Queue | None,
) -> tuple[dict[str, Stopwatch], dict[str, dict[str, float]]]:
    """Return a warm stopwatch and the memory of every implementation."""
    optimizers = Optimizers(params)
    watches: dict[str, Stopwatch] = {}
    memory: dict[str, dict[str, float]] = {}
    for impl, who in everyone.items():
        meter = Meter() if device == "cuda" else None
        entered = enter(who, params, optimizers, device)
        if meter is not None:
            meter.made(entered.optimizer)
        prepare = in_order(restore, entered.scale)
        watch = Stopwatch(entered.step, prepare, device, queue)
        watch.warm_up()
        memory[impl] = {}
        if meter is not None:
            size = sum(param.nbytes for param in params)
            memory[impl] = meter.read(entered.step, entered.optimizer, size)
        watches[impl] = watch
    return watches, memory


def compared(
    impl: str, watches: dict[str, Stopwatch], floor: float, extra: float
) -> dict[str, float]:
    """Return the ratios of an implementation to the floor and to the others.

    Args:
        impl: Its name.
        watches: Of all implementations.
        floor: In ms.
        extra: Minimum ms that a scaler adds to torch's bare fused AdamW.
    """
    ours = watches[impl].main()
    shown = {"ratio_to_floor": ratio(ours, [floor] * len(ours))}
    if TORCH in watches:
        theirs = watches[TORCH]
        shown["ratio_to_torch"] = ratio(ours, theirs.main())
        shown["wall_ratio_to_torch"] = ratio(
            watches[impl].times["wall"], theirs.times["wall"]
        )
    if BARE in watches:
        alone = watches[BARE].main()
        shown["ratio_to_bare"] = ratio(ours, alone)
        if impl == FUSED:
            least = [ms + extra for ms in alone]
            shown["ratio_to_bare_and_8_bytes"] = ratio(ours, least)
    return shown


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "step", rounds=15)
    parser.add_argument(
        "--set",
        action="append",
        choices=tuple(SETS),
        help=f"may be repeated; by default {', '.join(ON_CPU)}, and all on a GPU",
    )
    add_only(parser, STEP)
    args = parser.parse_args(arguments)
    queue = queue_of(args.device)
    bandwidth = bytes_per_ms(args.device, queue)
    ceilings = {"bandwidth_gb_s": bandwidth / 1e6}
    rows: list[dict[str, Any]] = []
    for name in args.set or (ON_GPU if args.device == "cuda" else ON_CPU):
        rows += measure(name, args.device, args.rounds, args.only, queue, bandwidth)
        save(args, "step", rows, **ceilings)
        # Scalers and optimizers are in reference cycles.
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    show(args, "step", rows, COLUMNS, "After backward, ms", **ceilings)


if __name__ == "__main__":
    main()
