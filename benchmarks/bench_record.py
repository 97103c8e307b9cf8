"""Time what verdicts, culprits and the run file add to a step on the host.

The loss scaled, then everything after backward (check, unscale, clip at 1.0, AdamW,
next scale) on the shapes of a model, healthy throughout, by one optimizer under four
scalers in turns:

  silent    makes nothing of its facts: they stay on the device; no judge, no file
  mailbox   sends them to the host, reads those of two steps ago, and drops them
  verdicts  as it comes: they are judged, culprits are ready, nothing is written
  recorded  names, verdicts, peaks, samples of the underflow meter and a run file

"added" is the median of what a scaler takes longer than the silent one in the same
turn: it sees everything, and the noise of two whole steps. "inside" is the median of
the time spent in what the silent one leaves out, by a clock around each of these calls,
while the scaler trains GPT-2 by itself; "inside mean" is the mean, which holds the
steps that are sampled. The host never waits for the device: a GPU is kept busy, and in
training it is waited for between the steps. On a CPU, which reads the gradients of a
sampled step itself, only the medians mean something.
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
MAILBOX = "mailbox"
SCALERS = {
    SILENT: "gradscale",
    MAILBOX: "gradscale",
    "verdicts": "gradscale",
    "recorded": "recorded",
}
JUDGING = ("verdicts", "recorded")
# What is trained for the shapes of each set, and steps of it that are not counted.
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


def silenced(scaler: Any, *, mailbox: bool) -> None:
    """Let a scaler make nothing of its facts, or only fetch them."""
    scaler._hear = lambda ledger, has_loss: None
    scaler._monitor.pass_by = lambda *facts: True
    if mailbox:
        scaler._monitor.pass_by = lambda *facts: False
        scaler._hear = lambda ledger, has_loss: scaler._mailbox.exchange(ledger)
    else:
        scaler._mailbox.letter = lambda ledger: (None, 0)


class Inside:
    """Clocks what a scaler does for verdicts and records, and for nothing else."""

    def __init__(self, scaler: Any) -> None:
        self.seconds: list[float] = []
        self._now = 0.0
        self._behind = scaler._monitor._behind
        for owner, name in (
            (scaler._mailbox, "letter"),
            (scaler._monitor, "pass_by"),
            (scaler, "_hear"),
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
        """Return the median and the mean, once the scale has found its place."""
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
    if impl in (SILENT, MAILBOX):
        silenced(entered.scaler, mailbox=impl == MAILBOX)
    grads = [param.grad for param in params]

    def restore() -> None:
        # Torch's fused optimizers write unscaled gradients.
        torch._foreach_copy_(grads, pristine)

    step = in_order(entered.scale, entered.step)
    watch = Stopwatch(step, restore, args.device, queue, clock="host")
    watch.warm_up()
    return watch


def in_training(name: str, impl: str, kind: str, args: Any) -> dict[str, float]:
    """Return the figures of the inside of a scaler that trains a model alone."""
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
