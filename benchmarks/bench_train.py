"""Time whole training steps of GPT-2: the cost of a scaler in use.

Forward and backward pass under autocast, clip at 1.0, AdamW, zero_grad; random tokens,
parameters in f32. The implementations train one model in turns, in blocks of a few
steps. Each is compared with clip and AdamW of the same kind without a scaler, block by
block (gradscale's own AdamW with torch's fused one): "overhead" is the median ratio
less 1, "at most" its 95 % upper confidence bound, by the bootstrap over the blocks.
A GPU trains in float16, a CPU, which has no fast float16, in bfloat16.
"""

import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.command import add_only, parser_for, save, show
from benchmarks.contestants import (
    Contestant,
    Entered,
    Optimizers,
    chosen,
    clipped,
    enter,
    ours,
    torchs,
)
from benchmarks.gpt2 import GPT2, Size, random_tokens
from benchmarks.record import quantiles
from benchmarks.timing import in_turns, ratios, upper_bound, wall_ms


class Run(NamedTuple):
    """A model size and its batches.

    Attributes:
        size: Of the model.
        batches: (sequences, length), one measurement each.
    """

    size: Size
    batches: list[tuple[int, int]]


RUNS = {
    "124M": Run(Size(), [(16, 1024), (2, 256)]),
    "tiny": Run(Size(257, 32, 32, 4, 2), [(4, 32)]),
}


def base_of(kind: str) -> str:
    """Return the implementation without a scaler for a kind of optimizer."""
    return f"no scaler + {'fused' if kind == 'own' else kind}"


TRAIN = {
    name: who
    for kind in ("fused", "foreach")
    for name, who in {
        base_of(kind): Contestant(kind, "", clipped),
        f"torch.amp + {kind}": Contestant(kind, "torch", torchs),
        f"gradscale + {kind}": Contestant(kind, "gradscale", ours),
        f"gradscale, torch's loop + {kind}": Contestant(kind, "gradscale", torchs),
    }.items()
} | {
    "gradscale + own AdamW": Contestant("own", "gradscale", ours),
    "gradscale, plain + fused": Contestant("fused", "plain", ours),
    "gradscale, recorded + fused": Contestant("fused", "recorded", ours),
    "gradscale, recorded + own AdamW": Contestant("own", "recorded", ours),
}

COLUMNS = {
    "batch": "batch",
    "implementation": "impl",
    "p20": "p20",
    "p50": "p50",
    "p80": "p80",
    "overhead %": "overhead_percent",
    "at most %": "overhead_bound_percent",
    "skipped": "skipped",
}


class Trainer:
    """Trains the shared model with one implementation."""

    def __init__(
        self, model: GPT2, entered: Entered, batches: list[Tensor], device: str
    ) -> None:
        self.model, self.entered, self.batches = model, entered, batches
        self.device = device
        self.dtype = torch.float16 if device == "cuda" else torch.bfloat16

    def train(self) -> None:
        """Take one step for every batch."""
        scaler = self.entered.scaler
        for tokens in self.batches:
            with torch.autocast(self.device, self.dtype):
                loss = self.model(tokens)
            (loss if scaler is None else scaler.scale(loss)).backward()
            self.entered.step()
            self.entered.optimizer.zero_grad(set_to_none=True)

    def skipped(self) -> bool:
        """Return whether a step was skipped: only then has the scale fallen."""
        scaler = self.entered.scaler
        return scaler is not None and scaler.get_scale() < scaler._init_scale


def measure(
    run: Run,
    batch: tuple[int, int],
    everyone: dict[str, Contestant],
    args: Any,
) -> list[dict[str, Any]]:
    """Time the implementations in turns at one batch size; return their rows."""
    torch.manual_seed(0)
    model = GPT2(run.size).to(args.device)
    params: list[Tensor] = list(model.parameters())
    # Short steps vary more, so a block has more of them.
    steps = args.block or (5 if batch[0] * batch[1] >= 8192 else 20)
    batches = [random_tokens(run.size, *batch, args.device) for _ in range(steps)]
    optimizers = Optimizers(params)
    trainers = {}
    for name, who in everyone.items():
        entered = enter(who, params, optimizers, args.device)
        trainers[name] = Trainer(model, entered, batches, args.device)
        trainers[name].train()
    times: dict[str, list[float]] = {name: [] for name in trainers}
    shown = f"{batch[0]}x{batch[1]}"
    for name in in_turns(list(trainers), args.rounds, shown):
        taken = wall_ms(trainers[name].train, args.device)
        times[name].append(taken / steps)
    return [
        {
            "batch": shown,
            "impl": name,
            "optimizer": who.optimizer,
            "dtype": str(trainers[name].dtype).removeprefix("torch."),
            "elements": sum(param.numel() for param in params),
            "tensors": len(params),
            "rounds": args.rounds,
            "steps_in_a_block": steps,
            **quantiles(times[name]),
            **overhead(times[name], times.get(base_of(who.optimizer))),
            "skipped": trainers[name].skipped(),
        }
        for name, who in everyone.items()
    ]


def overhead(ours: list[float], base: list[float] | None) -> dict[str, float]:
    """Return the overhead over the base; {} without a base."""
    if base is None or base is ours:
        return {}
    found = ratios(ours, base)
    middle, bound = statistics.median(found), upper_bound(found)
    return {
        "ratio_to_base": middle,
        "ratio_bound": bound,
        "overhead_percent": 100 * (middle - 1),
        "overhead_bound_percent": 100 * (bound - 1),
    }


def batch_of(text: str) -> tuple[int, int]:
    """Return (sequences, length) from a text such as 16x1024."""
    sequences, length = text.split("x")
    return int(sequences), int(length)


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "train", rounds=15)
    parser.add_argument(
        "--size",
        choices=tuple(RUNS),
        help="of the model; by default 124M, on a CPU tiny",
    )
    parser.add_argument(
        "--batch",
        action="append",
        type=batch_of,
        help="sequences and their length, such as 16x1024; may be repeated",
    )
    parser.add_argument(
        "--block", type=int, help="steps in a block; by default 5, for small batches 20"
    )
    add_only(parser, TRAIN)
    args = parser.parse_args(arguments)
    run = RUNS[args.size or ("124M" if args.device == "cuda" else "tiny")]
    everyone = chosen(TRAIN, args.only)
    rows: list[dict[str, Any]] = []
    for batch in args.batch or run.batches:
        rows += measure(run, batch, everyone, args)
        save(args, "train", rows)
    show(args, "train", rows, COLUMNS, "Training step, ms")


if __name__ == "__main__":
    main()
