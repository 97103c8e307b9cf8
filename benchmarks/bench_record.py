"""Time what verdicts, culprits and the run file add to a step on the host.

Everything after backward (check, unscale, clip at 1.0, AdamW, next scale) on the shapes
of a model, healthy throughout, by one optimizer under four scalers in turns:

  silent    makes nothing of its facts: no copy of them, no judge, no file
  mailbox   copies them behind the step, reads those of two steps ago, and drops them
  verdicts  as it comes: they are judged, culprits are ready, nothing is written
  recorded  names, verdicts, peaks, samples of the underflow meter and a run file

"added" is the median, and "added mean" the mean, of what a scaler takes longer than the
silent one in the same turn; the mean holds the steps that are sampled. On a GPU the
device is kept busy, so that the host never waits for it; on a CPU, which reads the
gradients of a sampled step itself, only the median means something.
"""

import statistics
from typing import Any

import torch

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
COLUMNS = {
    "set": "set",
    "optimizer": "optimizer",
    "scaler": "impl",
    "host p20": "p20",
    "host p50": "p50",
    "host p80": "p80",
    "added µs": "added_us",
    "added mean µs": "added_mean_us",
}


def silenced(scaler: Any, *, mailbox: bool) -> None:
    """Let a scaler make nothing of its facts, or only fetch them."""
    scaler._monitor.look = lambda *facts: None
    scaler._act_on_late_facts = lambda late: None
    if not mailbox:
        scaler._mailbox.exchange = lambda *facts, **more: None


def watch_of(
    impl: str, kind: str, optimizers: Optimizers, params: Any, args: Any, queue: Any
) -> Stopwatch:
    """Return the watch of one scaler, warmed up."""
    who = Contestant(kind, SCALERS[impl], ours)
    entered: Entered = enter(who, params, optimizers, args.device)
    if impl in (SILENT, MAILBOX):
        silenced(entered.scaler, mailbox=impl == MAILBOX)
    grads = [param.grad for param in params]
    pristine = [grad.clone() for grad in grads]

    def restore() -> None:
        # Torch's fused optimizers write unscaled gradients.
        torch._foreach_copy_(grads, pristine)

    prepare = in_order(restore, entered.scale)
    watch = Stopwatch(entered.step, prepare, args.device, queue, clock="host")
    watch.warm_up()
    return watch


def measure(name: str, kind: str, args: Any, queue: Queue | None) -> list[Any]:
    """Return a row for each scaler around one kind of optimizer."""
    torch.manual_seed(0)
    params = [torch.randn(shape, device=args.device) for shape in SETS[name]]
    for param in params:
        param.requires_grad_().grad = torch.randn_like(param)
    optimizers = Optimizers(params)
    watches = {
        impl: watch_of(impl, kind, optimizers, params, args, queue) for impl in SCALERS
    }
    for impl in in_turns(list(watches), args.rounds, f"{name} {kind}"):
        watches[impl].take()
    silent = watches[SILENT].main()
    rows = []
    for impl, watch in watches.items():
        added = [a - b for a, b in zip(watch.main(), silent, strict=True)]
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
                "added_mean_us": 1e3 * statistics.mean(added),
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
