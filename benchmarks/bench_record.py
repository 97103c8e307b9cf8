"""Time the host overhead of verdicts, culprits and the run file per step.

The loss scaled, then everything after backward (check, unscale, clip at 1.0, AdamW,
next scale) on the shapes of a model, healthy throughout, by one optimizer under four
scalers in turns:

  silent    leaves the rows on the device: no judge, no file
  copied    copies them to the host every fourth step, reads and drops them
  verdicts  the default: rows are judged, culprits are known, nothing is written
  recorded  names, verdicts, peaks, samples of the underflow meter and a run file

"added" is the median of the time beyond that of the silent scaler in the same turn; it
includes the noise of two whole steps. "inside" is the median of the time in the call
that the silent scaler leaves out, while the scaler trains GPT-2 by itself; "inside
mean" is the mean, which includes the steps that are sampled or judged. The host never
waits for the device within a step: a GPU is kept busy, and in training the host
synchronizes between steps. On a CPU, which reads the gradients of a sampled step
itself, only the medians are meaningful.
"""

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.bench_train import RUNS, Trainer
from benchmarks.command import parser_for, save, show
from benchmarks.contestants import (
    Contestant,
    Entered,
    Optimizers,
    enter,
    ours,
)
from benchmarks.gpt2 import GPT2, random_tokens
from benchmarks.models import gpt2_shapes
from benchmarks.timing import (
    Queue,
    Stopwatch,
    in_order,
    in_turns,
    queue_of,
    synchronize,
)

SETS = {"gpt2-124M": gpt2_shapes(), "tiny": gpt2_shapes(8, 1)}
SILENT = "silent"
COPIED = "copied"
SCALERS = {
    SILENT: "gradscale",
    COPIED: "gradscale",
    "verdicts": "gradscale",
    "recorded": "recorded",
}
JUDGING = ("verdicts", "recorded")
# The model trained for the shapes of each set, and the warm-up steps, not counted.
TRAINED = {"gpt2-124M": "124M", "tiny": "tiny"}
SETTLING = 30
COLUMNS = {
    "set": "set",
    "optimizer": "optimizer",
    "scaler": "impl",
    "host p20": "p20",
    "host p50": "p50",
    "host p80": "p80",
    "inside µs": "inside_us",
    "inside mean µs": "inside_mean_us",
    "added µs": "added_us",
}


def silenced(scaler: Any, *, copied: bool) -> None:
    """Make a scaler leave its rows on the device, or copy and drop them."""
    monitor = scaler._monitor
    monitor.end_update = lambda *given: None
    if copied:
        monitor.end_update = lambda _, state, steps: monitor._copies.advance(state)


class Inside:
    """Times the part of an update that judges and records."""

    def __init__(self, scaler: Any) -> None:
        self.seconds: list[float] = []
        self._now = 0.0
        self._steps = scaler._monitor._steps
        scaler._monitor.end_update = self._clocked(scaler._monitor.end_update)

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*given: Any, **more: Any) -> Any:
            # Freed outside the timed part, as with the silent scaler.
            held = next(iter(self._steps), None)
            begin = perf_counter()
            found = call(*given, **more)
            self._now += perf_counter() - begin
            del held
            return found

        return clocked

    def end_step(self) -> None:
        """Note the time of the step that has ended."""
        self.seconds.append(self._now)
        self._now = 0.0

    def figures(self) -> dict[str, float]:
        """Return the median and the mean, after the warm-up steps."""
        settled = self.seconds[SETTLING:]
        return {
            "inside_us": 1e6 * statistics.median(settled),
            "inside_mean_us": 1e6 * statistics.mean(settled),
        }


def watch_of(
    impl: str,
    kind: str,
    optimizers: Optimizers,
    pristine: list[Tensor],
    args: Any,
    queue: Any,
) -> Stopwatch:
    """Return the watch of one scaler, warmed up.

    Args:
        impl, kind: The scaler and the optimizer.
        optimizers: Of the parameters.
        pristine: The gradients to begin each step with.
        args, queue: As in `measure`.
    """
    params = optimizers.params
    who = Contestant(kind, SCALERS[impl], ours)
    entered: Entered = enter(who, params, optimizers, args.device)
    if impl in (SILENT, COPIED):
        silenced(entered.scaler, copied=impl == COPIED)
    grads = [param.grad for param in params]

    def restore() -> None:
        # Torch's fused optimizers write unscaled gradients.
        torch._foreach_copy_(grads, pristine)

    step = in_order(entered.scale, entered.step)
    watch = Stopwatch(step, restore, args.device, queue, clock="host")
    watch.warm_up()
    return watch


def in_training(name: str, impl: str, kind: str, args: Any) -> dict[str, float]:
    """Return the figures of `Inside` for a scaler that trains a model by itself."""
    torch.manual_seed(0)
    run = RUNS[TRAINED[name]]
    model = GPT2(run.size).to(args.device)
    params: list[Tensor] = list(model.parameters())
    who = Contestant(kind, SCALERS[impl], ours)
    entered = enter(who, params, Optimizers(params), args.device)
    inside = Inside(entered.scaler)
    # The smallest batch: the host's work is the same for all.
    tokens = random_tokens(run.size, *run.batches[-1], args.device)
    trainer = Trainer(model, entered, [tokens], args.device)
    console = Console(stderr=True)
    for _ in track(
        range(SETTLING + args.rounds), f"{name} {kind} {impl}", console=console
    ):
        synchronize(args.device)
        trainer.train()
        inside.end_step()
    return inside.figures()


def measure(name: str, kind: str, args: Any, queue: Queue | None) -> list[Any]:
    """Return a row for each scaler around one kind of optimizer."""
    torch.manual_seed(0)
    params = [torch.randn(shape, device=args.device) for shape in SETS[name]]
    for param in params:
        param.requires_grad_().grad = torch.empty_like(param)
    optimizers = Optimizers(params)
    pristine = [torch.randn_like(param) for param in params]
    given = kind, optimizers, pristine, args, queue
    watches = {impl: watch_of(impl, *given) for impl in SCALERS}
    for impl in in_turns(list(watches), args.rounds, f"{name} {kind}"):
        watches[impl].take()
    silent = watches[SILENT].main()
    rows = []
    for impl, watch in watches.items():
        added = [a - b for a, b in zip(watch.main(), silent, strict=True)]
        inside = in_training(name, impl, kind, args) if impl in JUDGING else {}
        rows.append(
            {
                "impl": impl,
                "set": name,
                "optimizer": kind,
                "dtype": "f32",
                "elements": sum(param.numel() for param in params),
                "tensors": len(params),
                "rounds": args.rounds,
                **watch.figures(),
                "added_us": 1e3 * statistics.median(added),
                **inside,
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "record", rounds=200)
    parser.add_argument("--set", default="gpt2-124M", choices=tuple(SETS))
    args = parser.parse_args(arguments)
    queue = queue_of(args.device)
    rows: list[dict[str, Any]] = []
    for kind in ("own", "fused"):
        rows += measure(args.set, kind, args, queue)
        save(args, "record", rows)
    show(args, "record", rows, COLUMNS, "Host time of a step, ms")


if __name__ == "__main__":
    main()
