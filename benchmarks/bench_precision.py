"""Train with float16 weights, with and without f32 masters, against FP32.

A small GPT on the source text of Python's standard library, 2000 steps with a cosine
schedule, for several seeds. Each optimizer trains

  fp32            f32 weights, no scaler
  own masters     level O2 with gradscale.torch.optim's optimizer, if there is one
  master_weights  level O2 around torch's optimizer, or a custom one
  no masters      level O2 without masters

"loss" is the mean loss over held-out text after the last step, averaged over the seeds;
"gap" is its distance from fp32, "noise" the spread (largest less smallest) of fp32 over
the seeds. "within" is True if the absolute gap is at most the noise. A seed gives every
implementation the same initial weights and batches: "least gap" and "largest gap" are
the extreme gaps of single seeds. p50 is the wall time of a step, host included.

The last rows are the cost of masters with own optimizers: everything after backward for
f16 parameters, beside the time of the unavoidable memory traffic (see bench_step).
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import bench_step
from benchmarks.command import add_only, parser_for, save, show
from benchmarks.gpt2 import GPT2, Size
from benchmarks.record import quantiles
from benchmarks.timing import bytes_per_ms, queue_of
from gradscale.demo.text import SYMBOLS, library_text
from gradscale.torch import GradScaler, initialize, optim

HELD_OUT_BATCHES = 20


class Run(NamedTuple):
    """A model size and its training.

    Attributes:
        size: Size of the model.
        batch: Sequences in a batch; each has the length of the context.
        steps: Optimizer steps.
        seeds: Number of runs of each kind.
        halves: Set of bench_step for the cost of masters.
    """

    size: Size
    batch: int
    steps: int
    seeds: int
    halves: str


RUNS = {
    "small": Run(Size(SYMBOLS, 64, 128, 4, 3), 32, 2000, 4, "halves-1.24B"),
    "tiny": Run(Size(SYMBOLS, 8, 8, 2, 1), 2, 3, 2, "tiny-halves"),
}


class Logits(GPT2):
    """The model without its loss, which is computed in f32 outside."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return f[batch, length, vocabulary] for i64[batch, length]."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_out(x), self.tokens.weight)


class SignMomentum(torch.optim.Optimizer):
    """A custom optimizer: the sign of a running mean, one tensor at a time."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 1 - group["beta"])
                param.add_(state["mean"].sign(), alpha=-group["lr"])


class Kind(NamedTuple):
    """An optimizer.

    Attributes:
        make: Creates it from parameters.
        own: Creates its gradscale.torch.optim counterpart; None if there is none.
    """

    make: Callable[[Any], torch.optim.Optimizer]
    own: Callable[[Any], torch.optim.Optimizer] | None = None


# Low rates: updates are close to the float16 spacing, where masters matter.
RATES = {"AdamW": 3e-4, "SGD": 3e-3, "Adafactor": 1e-3, "custom": 5e-5}
# The same eps for all. Without masters the default, 1e-8, is 0 in float16 and refused;
# with 1e-6 the weights are not finite after 17 steps.
ADAM = {"lr": RATES["AdamW"], "eps": 1e-4}
KINDS = {
    "AdamW": Kind(
        lambda params: torch.optim.AdamW(params, **ADAM),
        lambda params: optim.AdamW(params, **ADAM),
    ),
    "SGD": Kind(
        lambda params: torch.optim.SGD(params, lr=RATES["SGD"], momentum=0.9),
        lambda params: optim.SGD(params, lr=RATES["SGD"], momentum=0.9),
    ),
    "Adafactor": Kind(
        lambda params: torch.optim.Adafactor(params, lr=RATES["Adafactor"]),
    ),
    "custom": Kind(
        lambda params: SignMomentum(params, lr=RATES["custom"]),
    ),
}
IMPLS = ("fp32", "own masters", "master_weights", "no masters")
COST = "cost of own masters"

COLUMNS = {
    "optimizer": "optimizer",
    "implementation": "impl",
    "loss": "loss",
    "gap": "gap",
    "least gap": "least_gap",
    "largest gap": "largest_gap",
    "noise": "noise",
    "within": "within",
    "skipped": "skipped",
    "p50": "p50",
    "× floor": "ratio_to_floor",
}


def prepared(
    kind: Kind, impl: str, model: Logits
) -> tuple[torch.optim.Optimizer, GradScaler | None]:
    """Return the optimizer and the scaler of an implementation; cast the model."""
    if impl == "fp32":
        return kind.make(model.parameters()), None
    make = (impl == "own masters" and kind.own) or kind.make
    masters = impl != "no masters"
    # Own optimizers always have masters.
    _, optimizer, scaler = initialize(
        model,
        make(model.parameters()),
        "O2",
        masters=masters,
        scaler={"allow_fp16": not masters},
    )
    return optimizer, scaler


def train(
    kind: Kind, impl: str, run: Run, seed: int, device: str
) -> tuple[float, list[float], int]:
    """Train once; return the held-out loss, ms of each step, and the skipped steps."""
    torch.manual_seed(seed)
    model = Logits(run.size).to(device)
    optimizer, scaler = prepared(kind, impl, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    text = library_text()
    times = []
    for tokens in batches(text.training, run, run.steps, seed, device):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        times.append(1e3 * (time.perf_counter() - start))
    with torch.no_grad():
        held_out = batches(text.held_out, run, HELD_OUT_BATCHES, 0, device)
        losses = [loss_of(model, tokens).item() for tokens in held_out]
    skipped = 0 if scaler is None else int(scaler.skipped_steps)
    return statistics.fmean(losses), times, skipped


def loss_of(model: Logits, tokens: Tensor) -> Tensor:
    """Return f32[], the next-token loss of i64[batch, length + 1]."""
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(
    text: Tensor, run: Run, count: int, seed: int, device: str
) -> Iterable[Tensor]:
    """Yield i64[batch, length + 1] from random positions of a text; reproducible."""
    draw = torch.Generator().manual_seed(seed)
    length = run.size.context
    text = text.to(device)
    offsets = torch.arange(length + 1, device=device)
    for _ in range(count):
        last = len(text) - length - 1
        starts = torch.randint(last, (run.batch, 1), generator=draw).to(device)
        yield text[starts + offsets]


def measure(
    name: str, kind: Kind, impls: Iterable[str], run: Run, args: Any
) -> list[dict[str, Any]]:
    """Train with one optimizer, all seeds; return a row for each implementation."""
    rows: list[dict[str, Any]] = []
    for impl in impls:
        if impl == "own masters" and kind.own is None:
            continue
        done = [train(kind, impl, run, seed, args.device) for seed in range(run.seeds)]
        losses = [loss for loss, _, _ in done]
        rows.append(
            {
                "impl": impl,
                "optimizer": name,
                "dtype": "f32" if impl == "fp32" else "f16",
                "elements": sum(p.numel() for p in Logits(run.size).parameters()),
                "steps": run.steps,
                "seeds": run.seeds,
                "losses": losses,
                "loss": statistics.fmean(losses),
                "skipped": sum(skipped for _, _, skipped in done),
                **quantiles([ms for _, times, _ in done for ms in times]),
            }
        )
    return compared(rows)


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of one optimizer with their gaps to fp32, if it was run.

    Args:
        rows: The result of `measure`; losses at one index have the same seed.
    """
    base = next((row["losses"] for row in rows if row["impl"] == "fp32"), None)
    if base is None:
        return rows
    noise = max(base) - min(base)
    found = []
    for row in rows:
        gaps = [loss - other for loss, other in zip(row["losses"], base, strict=True)]
        gap = statistics.fmean(gaps)
        distances = {
            "gap": gap,
            "least_gap": min(gaps),
            "largest_gap": max(gaps),
            "noise": noise,
            # A non-finite loss is never within the noise.
            "within": math.isfinite(gap) and abs(gap) <= noise,
        }
        found.append(row if row["impl"] == "fp32" else row | distances)
    return found


def cost(run: Run, args: Any) -> list[dict[str, Any]]:
    """Return the rows of bench_step for f16 parameters with masters."""
    queue = queue_of(args.device)
    bandwidth = bytes_per_ms(args.device, queue)
    found = bench_step.measure(
        run.halves, args.device, args.rounds, None, queue, bandwidth
    )
    return [{**row, "impl": COST, "optimizer": "AdamW"} for row in found]


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "precision", rounds=15)
    parser.add_argument(
        "--size",
        choices=tuple(RUNS),
        help="of the model; by default small, on a CPU tiny",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, help="runs of each kind")
    parser.add_argument(
        "--optimizer", action="append", choices=tuple(KINDS), help="only this one"
    )
    add_only(parser, (*IMPLS, COST))
    args = parser.parse_args(arguments)
    run = RUNS[args.size or ("small" if args.device == "cuda" else "tiny")]
    run = run._replace(steps=args.steps or run.steps, seeds=args.seeds or run.seeds)
    impls = [impl for impl in IMPLS if impl in (args.only or IMPLS)]
    rows: list[dict[str, Any]] = []
    for name in (args.optimizer or KINDS) if impls else ():
        rows += measure(name, KINDS[name], impls, run, args)
        save(args, "precision", rows)
    if COST in (args.only or [COST]):
        rows += cost(run, args)
    show(args, "precision", rows, COLUMNS, "Training with float16 weights")


if __name__ == "__main__":
    main()
