"""Time what verdicts, culprits and the run file add to a step on the host.

Scaling the loss and everything after backward (check, unscale, clip at 1.0, AdamW, next
scale) on the shapes of a model, healthy throughout, with one optimizer under four
scalers in turns:

  silent    step rows stay on the device: no copy, no judge, no file
  copied    rows are copied to the host in every fourth update, and dropped
  verdicts  the default: rows are judged, culprits can be named, nothing is written
  recorded  names, verdicts, peaks, samples of the underflow meter and a run file

"added" is the median difference to the silent scaler in the same turn: complete, but
with the noise of two whole steps. "inside" is the median time within the calls that the
silent scaler omits, while the scaler trains GPT-2 by itself; "inside mean" is the mean,
which includes the updates that judge rows and the sampled steps. The host never waits
for the device: a GPU is kept busy, and training synchronizes between the steps. Only
the medians mean something on a CPU, which reads the gradients of a sampled step itself.
"""

import statistics
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
# The trained model of each set, and its uncounted first steps.
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
    """Replace the judging of step rows by nothing, or by the copy to the host alone."""
    monitor = scaler._monitor
    copies = monitor._copies

    def end_update(scaler: Any, state: Any, steps: Any) -> None:
        if copied:
            copies.advance(state)

    monitor.end_update = end_update


class Inside:
    """Clocks the calls of a scaler that serve verdicts and records."""

    def __init__(self, scaler: Any) -> None:
        self.seconds: list[float] = []
        monitor = scaler._monitor
        end_update, steps = monitor.end_update, monitor._steps

        def clocked(*given: Any) -> None:
            # The silent scaler frees the snapshot too, elsewhere.
            oldest = next(iter(steps), None)
            begin = perf_counter()
            end_update(*given)
            self._now += perf_counter() - begin
            del oldest

        self._now = 0.0
        monitor.end_update = clocked

    def end_step(self) -> None:
        """Note the time of the step."""
        self.seconds.append(self._now)
        self._now = 0.0

    def figures(self) -> dict[str, float]:
        """Return the median and the mean, without the first steps."""
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
    """Return a warm stopwatch of one scaler.

    Args:
        impl, kind: The scaler and the optimizer.
        optimizers: Of the parameters.
        pristine: The gradients before each step.
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
    """Return the "inside" figures of a scaler that trains a model by itself."""
    torch.manual_seed(0)
    run = RUNS[TRAINED[name]]
    model = GPT2(run.size).to(args.device)
    params: list[Tensor] = list(model.parameters())
    who = Contestant(kind, SCALERS[impl], ours)
    entered = enter(who, params, Optimizers(params), args.device)
    inside = Inside(entered.scaler)
    # The smallest batch: host work is the same for all.
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
    """Return the rows of all scalers with one kind of optimizer."""
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
