"""Run files, well and sick, written as a live run writes them."""

import math
import random
from collections.abc import Iterable, Sequence

from gradscale import StepRecord
from gradscale.diagnosis import Diagnosis, diagnose_run
from gradscale.judge.finding_builders import Reported
from gradscale.judge.findings import clear_recovered, merge_repeats
from gradscale.judge.judge import Judge
from gradscale.runfile import BINS, RunWriter, TensorSample, open_run
from tests.judge import histories

SICK = ("decoder.3.ffn.o.weight", "decoder.3.ffn.i.weight")
POLICY = {
    "kind": "DynamicScale",
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": 2.0**-24,
    "max_scale": 2.0**126,
}
TENSORS = [f"decoder.{layer}.ffn.{part}.weight" for layer in range(4) for part in "io"]


def write(path, records: Iterable[StepRecord], *, culprits=None, **meta):
    """Write a run as a live judge sees it; return what that judge said in all.

    Args:
        path: The file.
        records: The steps.
        culprits: From a record to the names of tensors that were not finite.
        meta: Entries of the file.
    """
    judge, reported, blamed = Judge(tensors=len(TENSORS)), Reported(), ()
    meta = {"policy": POLICY, "parameters": TENSORS, **meta}
    with RunWriter(path, meta=meta, backlog=1 << 22) as writer:
        for record in records:
            names = tuple(culprits(record)) if culprits else ()
            verdict, said = judge.see(record, names)
            reported.add(said, judge.episode)
            amax = math.nan if record.nan else record.amax or None
            writer.step(
                record.step,
                record.scale,
                record.applied,
                verdict.code,
                record.grad_norm,
                amax,
                record.loss,
            )
            if names and names != blamed:
                blamed = names
                named = {"culprits": names, "count": len(names)}
                writer.event(verdict.code, step=record.step, data=named)
            for finding in said:
                data = finding.as_dict()
                writer.event(finding.code, step=record.step, data=data)
    found = [*map(judge.up_to_now, reported.up_to_now()), *judge.end()]
    return merge_repeats(clear_recovered(found, judge.healthy_at))


def falling_loss(steps: int, seed: int = 0) -> list[float]:
    """Return a loss as training has it."""
    rng = random.Random(seed)
    return [1.5 + 3.0 / (1.0 + n / 60.0) + rng.gauss(0.0, 0.03) for n in range(steps)]


def healthy(steps: int = 3000, init: int = 24) -> Iterable[StepRecord]:
    """Return a run that comes down from 2^24 and then probes now and then."""
    safe = histories.healthy("gpt", 3, steps, median=15.5, drift=0.5)
    records = histories.dynamic(
        safe, init=init, interval=400, losses=falling_loss(steps)
    )
    return (record._replace(grad_norm=_norm(record)) for record in records)


def _norm(record: StepRecord) -> float:
    return 1.5 * record.amax / record.scale if record.finite else math.inf


def saw_tooth(steps: int = 3000) -> Iterable[StepRecord]:
    """Return a run that is raised every 100 steps, and falls back at once."""
    return histories.dynamic([15.0] * steps, init=15, interval=100)


def collapse(steps: int = 400, since: int = 300) -> Iterable[StepRecord]:
    """Return a run in which nothing fits from some step on, infinite and no NaN."""
    safe = [15.0] * (since - 1) + [-99.0] * (steps - since + 1)
    return histories.dynamic(safe, init=15, losses=falling_loss(steps))


def nan_loss(steps: int = 150, since: int = 100) -> Iterable[StepRecord]:
    """Return a run whose loss is NaN from some step on."""
    losses = falling_loss(steps)
    losses[since - 1 :] = [math.nan] * (steps - since + 1)
    records = histories.dynamic([20.0] * steps, init=16, losses=losses)
    return (
        r if r.loss_finite else r._replace(nan=True, amax=math.nan) for r in records
    )


def nan_gradients(steps: int = 150, since: int = 100) -> Iterable[StepRecord]:
    """Return a run whose gradients are NaN under a finite loss from some step on."""
    safe = [20.0] * (since - 1) + [-99.0] * (steps - since + 1)
    records = histories.dynamic(safe, init=16, losses=falling_loss(steps))
    return (r if r.finite else r._replace(nan=True) for r in records)


def sample(centre: float, spread: float, total: int, zeros: int = 0) -> TensorSample:
    """Return counts of magnitudes around 2^centre."""
    weights = {
        e: math.exp(-0.5 * ((e + 0.5 - centre) / spread) ** 2) for e in range(-60, 40)
    }
    whole = sum(weights.values())
    counts = {e: round((total - zeros) * w / whole) for e, w in weights.items()}
    bins = [counts[place - 24] for place in range(BINS)]
    below = sum(n for e, n in counts.items() if e < -24)
    above = sum(n for e, n in counts.items() if e >= 16)
    return TensorSample(
        total=zeros + sum(counts.values()),
        zeros=zeros,
        subnormals=sum(bins[:10]),
        histogram=bins,
        below=below,
        above=above,
    )


def write_sampled(
    path, scales: Sequence[float], centre: float = -23.0, every: int = 100
) -> None:
    """Write finite steps at given scales, and samples of what gradients look like.

    What float16 would flush is below its range here, as in gradients of float32.

    Args:
        path: The file.
        scales: The scale of each step.
        centre: log2 of the usual magnitude of an unscaled gradient.
        every: The distance of samples.
    """
    with RunWriter(path, meta={"policy": {"kind": "StaticScale"}}) as writer:
        for step, scale in enumerate(scales, start=1):
            shift = math.log2(scale)
            writer.step(step, scale, True, "GS000", 0.1, 2.0 ** (centre + 14 + shift))
            if step % every == 0:
                seen = {
                    name: sample(centre + shift - layer / 2, 4.0, 4096, 100 * layer)
                    for layer, name in enumerate(TENSORS)
                }
                writer.samples(step, seen)


def sick_tensors(record: StepRecord) -> tuple[str, ...]:
    """Return who is not finite in a step that is not."""
    return () if record.finite else SICK


def facts(**given) -> StepRecord:
    """Return the record of a step deep in a run."""
    record = StepRecord(step=0, scale=1024.0, applied=False, finite=False, amax=1e3)
    return record._replace(**given)


def diagnosed(path, **options) -> Diagnosis:
    """Return what a run file tells."""
    with open_run(path) as run:
        return diagnose_run(run, **options)
