"""Time everything after backward: check, unscale, clip, fused AdamW, scale update.

The implementations take turns in one run on the same parameters and gradients, so
that their ratio means something even on a shared machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import gradscale.torch
from benchmarks.models import gpt2_shapes
from benchmarks.record import quantiles, result, torch_place, write

MAX_NORM = 1.0
Step = Callable[[], None]


SETS = {"gpt2-124M": gpt2_shapes(), "adapters-4000x1024": [(1024,)] * 4000}


def torch_step(scaler: Any, params: list[Tensor], optimizer: Any) -> Step:
    """Return torch's documented way to clip under a scaler."""

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def our_step(scaler: Any, optimizer: Any) -> Step:
    """Return the same with the clip folded into the step."""

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def contestants(params: list[Tensor], device: str) -> dict[str, Step]:
    """Return the implementations by name; each has its own optimizer state."""

    def adamw() -> Any:
        return torch.optim.AdamW(params, lr=1e-5, fused=True)

    def started(scaler: Any) -> Any:
        # Large scales are not needed: time does not depend on the values.
        scaler.scale(torch.zeros((), device=device))
        return scaler

    theirs = started(torch.amp.GradScaler(device))
    same_loop = started(gradscale.torch.GradScaler(device))
    folded = started(gradscale.torch.GradScaler(device))
    return {
        "torch.amp.GradScaler": torch_step(theirs, params, adamw()),
        "gradscale": our_step(folded, adamw()),
        "gradscale, torch's loop": torch_step(same_loop, params, adamw()),
        "no scaler, no clip": adamw().step,
    }


def timed(step: Step, device: str) -> float:
    """Return the time of one step in ms, host and device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(name: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """Time every contestant `rounds` times in turns; return one row for each."""
    torch.manual_seed(0)
    params = [torch.randn(shape, device=device) for shape in SETS[name]]
    pristine = [torch.randn_like(p) for p in params]
    for param in params:
        param.requires_grad_().grad = torch.empty_like(param)
    steps = contestants(params, device)
    times: dict[str, list[float]] = {impl: [] for impl in steps}
    for turn in track(
        range(-2, rounds), description=name, console=Console(stderr=True)
    ):
        order = list(steps)
        # Nobody always goes first.
        for impl in order[turn % len(order) :] + order[: turn % len(order)]:
            torch._foreach_copy_([p.grad for p in params], pristine)
            elapsed = timed(steps[impl], device)
            if turn >= 0:
                times[impl].append(elapsed)
    base = times["torch.amp.GradScaler"]
    return [
        {
            "set": name,
            "impl": impl,
            "dtype": "f32",
            "elements": sum(p.numel() for p in params),
            "tensors": len(params),
            "rounds": rounds,
            **quantiles(taken),
            "ratio_to_torch": statistics.median(
                ours / theirs for ours, theirs in zip(taken, base, strict=True)
            ),
        }
        for impl, taken in times.items()
    ]


def table(record: dict[str, Any]) -> Table:
    """Return the record as a table for the terminal."""
    shown = Table(title=f"After backward, ms ({record['device']})")
    for column in ("set", "implementation", "p20", "p50", "p80", "against torch"):
        shown.add_column(column, justify="left" if column[0] in "si" else "right")
    for row in record["rows"]:
        numbers = [f"{row[q]:.2f}" for q in ("p20", "p50", "p80")]
        ratio = f"{row['ratio_to_torch']:.2f} x"
        shown.add_row(row["set"], row["impl"], *numbers, ratio)
    return shown


def main() -> None:
    """Measure, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=15, help="timed turns for each")
    parser.add_argument("--set", choices=tuple(SETS), help="only this set of tensors")
    parser.add_argument("--commit", default="", help="where git cannot tell it")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    args = parser.parse_args()
    names = [args.set] if args.set else list(SETS)
    rows = [row for name in names for row in measure(name, args.device, args.rounds)]
    record = result("step", torch_place(args.device), rows, args.commit)
    write(args.out, record)
    if args.json:
        print(json.dumps(record))
    else:
        Console(width=100).print(table(record))


if __name__ == "__main__":
    main()
