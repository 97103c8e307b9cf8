"""Time what verdicts, culprits and the run file add to a step on the host.

The loss scaled, then everything after backward (check, unscale, clip at 1.0, AdamW,
next scale) on the shapes of a model, healthy throughout, by one optimizer under four
scalers in turns:

  silent    makes nothing of its facts: they stay on the device; no judge, no file
  mailbox   sends them to the host, reads those of two steps ago, and drops them
  verdicts  as it comes: they are judged, culprits are ready, nothing is written
  recorded  names, verdicts, peaks, samples of the underflow meter and a run file

"inside" is the median of the time spent in what the silent one leaves out, by a clock
around each of these calls, in twins of the scalers that take turns with the others.
"added" is the median of what a scaler takes longer than the silent one in the same
turn: it sees everything, and the noise of two whole steps. "inside mean" is the mean,
which holds the steps that are sampled. On a GPU the device is kept busy, so that the
host never waits for it; on a CPU, which reads the gradients of a sampled step itself,
only the medians mean something.
"""

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import parser_for, save, show
from benchmarks.contestants import (
    Contestant,
    Entered,
    Optimizers,
    enter,
    ours,
)
from benchmarks.models import gpt2_shapes
from benchmarks.timing import Queue, Stopwatch, in_order, in_turns, queue_of
from gradscale.torch import looks

SETS = {"gpt2-124M": gpt2_shapes(), "tiny": gpt2_shapes(8, 1)}
SILENT = "silent"
MAILBOX = "mailbox"
SCALERS = {
    SILENT: "gradscale",
    MAILBOX: "gradscale",
    "verdicts": "gradscale",
    "recorded": "recorded",
}
JUDGING = ("verdicts", "recorded")
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


def silenced(scaler: Any, *, mailbox: bool) -> None:
    """Let a scaler make nothing of its facts, or only fetch them."""
    scaler._monitor.look = lambda *facts: None
    scaler._act_on_late_facts = lambda late: None
    if not mailbox:
        scaler._mailbox.letter = lambda ledger: (None, 0)
        scaler._mailbox.exchange = lambda *facts, **more: None


class Inside:
    """Clocks what a scaler does for verdicts and records, and for nothing else."""

    def __init__(self, scaler: Any) -> None:
        self.seconds: list[float] = []
        self._now = 0.0
        self._behind = scaler._monitor._behind
        monitor, mailbox = scaler._monitor, scaler._mailbox
        for owner, name in (
            (monitor, "look"),
            (mailbox, "letter"),
            (mailbox, "exchange"),
            (monitor, "put_off"),
            (scaler, "_act_on_late_facts"),
        ):
            setattr(owner, name, self._clocked(getattr(owner, name)))

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*given: Any, **more: Any) -> Any:
            # The silent one lets go of it too, elsewhere.
            held = next(iter(self._behind), None)
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
        """Return the median and the mean."""
        return {
            "inside_us": 1e6 * statistics.median(self.seconds),
            "inside_mean_us": 1e6 * statistics.mean(self.seconds),
        }


def watch_of(
    impl: str,
    kind: str,
    optimizers: Optimizers,
    pristine: list[Tensor],
    args: Any,
    queue: Any,
    *,
    clocked: bool = False,
) -> tuple[Stopwatch, Inside | None]:
    """Return the watch of one scaler, warmed up.

    Args:
        impl, kind: The scaler and the optimizer.
        optimizers: Of the parameters.
        pristine: The gradients to begin each step with.
        args, queue: As in `measure`.
        clocked: Also return a clock for its inside.
    """
    params = optimizers.params
    who = Contestant(kind, SCALERS[impl], ours)
    entered: Entered = enter(who, params, optimizers, args.device)
    if impl in (SILENT, MAILBOX):
        silenced(entered.scaler, mailbox=impl == MAILBOX)
    grads = [param.grad for param in params]

    def restore() -> None:
        # Torch's fused optimizers write unscaled gradients.
        torch._foreach_copy_(grads, pristine)

    inside = Inside(entered.scaler) if clocked else None
    steps = [entered.scale, entered.step]
    steps += [] if inside is None else [inside.end_step]
    watch = Stopwatch(in_order(*steps), restore, args.device, queue, clock="host")
    watch.warm_up()
    if inside is not None:
        inside.seconds.clear()
    return watch, inside


def measure(name: str, kind: str, args: Any, queue: Queue | None) -> list[Any]:
    """Return a row for each scaler around one kind of optimizer."""
    torch.manual_seed(0)
    params = [torch.randn(shape, device=args.device) for shape in SETS[name]]
    for param in params:
        param.requires_grad_().grad = torch.empty_like(param)
    optimizers = Optimizers(params)
    pristine = [torch.randn_like(param) for param in params]
    given = kind, optimizers, pristine, args, queue
    watches = {impl: watch_of(impl, *given)[0] for impl in SCALERS}
    clocked = {impl: watch_of(impl, *given, clocked=True) for impl in JUDGING}
    twins = {f"{impl}, clocked": watch for impl, (watch, _) in clocked.items()}
    everyone = watches | twins
    for impl in in_turns(list(everyone), args.rounds, f"{name} {kind}"):
        everyone[impl].take()
    silent = watches[SILENT].main()
    rows = []
    for impl, watch in watches.items():
        added = [a - b for a, b in zip(watch.main(), silent, strict=True)]
        inside = clocked[impl][1] if impl in clocked else None
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
                **({} if inside is None else inside.figures()),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "record", rounds=200)
    parser.add_argument("--set", default="gpt2-124M", choices=tuple(SETS))
    args = parser.parse_args(arguments)
    queue = queue_of(args.device)
    if args.device == "cuda":
        # Otherwise it comes in the middle of a measurement.
        looks.build()
    rows: list[dict[str, Any]] = []
    for kind in ("own", "fused"):
        rows += measure(args.set, kind, args, queue)
        save(args, "record", rows)
    show(args, "record", rows, COLUMNS, "Host time of a step, ms")


if __name__ == "__main__":
    main()
