"""Runs of the dynamic rule, well and lost, re-created step by step.

A run is told by its safe scale: for each step, log2 of the largest scale that would
not overflow on that batch. The rule then gives the scale, the skips and the records.
The lost runs follow what their people wrote down; what they did not write down is
stated with each.
"""

import math
import random
from collections.abc import Iterable, Iterator

from gradscale import StepRecord

# How far the safe scale of a batch is from its median, in bits, and how often: five
# FP16 runs of 1400 steps each, every batch tried at several scales.
NOISE = {
    "conv": {-3: 1, -2: 30, -1: 289, 0: 801, 1: 277, 2: 2},
    "gpt": {-2: 11, -1: 191, 0: 821, 1: 377},
    "lstm": {-2: 4, -1: 252, 0: 1040, 1: 104},
    "vit": {-3: 2, -2: 65, -1: 319, 0: 563, 1: 286, 2: 89, 3: 42, 4: 34},
    "policy_gradient": dict(
        zip(range(-6, 5), (1, 2, 2, 35, 123, 323, 436, 269, 153, 49, 7), strict=True)
    ),
}
# In those runs the largest weight gradient at the safe scale was about half of 65504.
FULL = 15.0


def dynamic(
    safe: Iterable[float],
    *,
    init: int = 16,
    interval: int = 2000,
    floor: int = -24,
    first: int = 1,
    losses: Iterable[float | None] | None = None,
) -> Iterator[StepRecord]:
    """Yield the records of the dynamic rule, doubling and halving, on a run.

    Args:
        safe: log2 of the safe scale, a step each.
        init: log2 of the first scale.
        interval: growth_interval.
        floor: log2 of min_scale.
        first: The number of the first step; above 1 the run was resumed.
        losses: The loss of each step, if it is known. NaN is not finite.
    """
    scale, finite_steps, at_floor, grown = init, 0, 0, False
    calibrated = first > 1
    known = iter(losses) if losses is not None else None
    for step, limit in enumerate(safe, start=first):
        loss = next(known) if known is not None else None
        loss_finite = loss is None or math.isfinite(loss)
        finite = scale <= limit and loss_finite
        at_floor = 0 if finite or scale > floor else at_floor + 1
        yield StepRecord(
            step=step,
            scale=2.0**scale,
            applied=finite,
            finite=finite,
            loss_finite=loss_finite,
            calibrated=calibrated,
            grown=grown,
            floor_steps=at_floor,
            amax=2.0 ** (FULL + scale - limit) if finite else math.inf,
            loss=loss,
        )
        grown = False
        if finite:
            calibrated = True
            finite_steps += 1
            if finite_steps == interval:
                scale, finite_steps, grown = scale + 1, 0, True
        else:
            scale, finite_steps = max(floor, scale - 1), 0


def noise(kind: str, rng: random.Random, steps: int) -> list[int]:
    """Return the noise of one of the recorded runs, drawn anew."""
    return rng.choices(*zip(*NOISE[kind].items(), strict=True), k=steps)  # type: ignore[arg-type]  # values, weights


def healthy(
    kind: str, seed: int, steps: int, median: float = 17.0, drift: float = 2.0
) -> list[float]:
    """Return the safe scales of a healthy run.

    The median moves up and down by `drift` bits over 40,000 steps, as learning rate
    and loss make it do.
    """
    drawn = noise(kind, random.Random(seed), steps)
    turn = 2.0 * math.pi / 40_000.0
    return [
        median + drift * math.sin(turn * step) + bits for step, bits in enumerate(drawn)
    ]


def glm_130b() -> Iterator[StepRecord]:
    """GLM-130B, June 2022: the scale falls from step 33,710, the loss from 33,740.

    Source: https://github.com/THUDM/GLM-130B/blob/main/logs/main-log-en.md. Taken on:
    the run is seen from step 30,000; gradients double every three steps from 33,710
    on; window 1000; the loss is 2.2, grows from 33,740 and is NaN from 33,760.
    """
    first, falls, explodes, steps = 30_000, 33_710, 33_740, 3_800
    drawn = noise("gpt", random.Random(130), steps)
    safe = [
        17.0 + bits - max(0, first + index - falls) / 3.0
        for index, bits in enumerate(drawn)
    ]
    losses = [_exploding(first + index, 2.2, explodes) for index in range(steps)]
    return dynamic(safe, init=16, interval=1000, first=first, losses=losses)


def _exploding(step: int, usual: float, explodes: int) -> float:
    if step < explodes:
        return usual
    return usual + 0.5 * (step - explodes) if step < explodes + 20 else math.nan


def bigscience_104b() -> Iterator[StepRecord]:
    """BigScience 104B, first attempt: heading for the end from 4,700, dead at 7,000.

    Source: https://github.com/bigscience-workshop/bigscience/blob/master/train/
    tr8-104B-wide/chronicles.md: loss 6.44 and scale 2048 at step 7000, loss 11.4 at
    7010, later NaN; "heading toward divergence ... maybe around 4.7K". Taken on: the
    safe scale falls evenly, by 5 bits, from 4,700 on; window 1000; NaN from 7,220.
    """
    falls, explodes, steps = 4_700, 7_000, 7_240
    drawn = noise("gpt", random.Random(104), steps)
    safe = [
        18.0 + bits - 5.0 * max(0, index - falls) / (explodes - falls)
        for index, bits in enumerate(drawn)
    ]
    losses = [
        6.44 if step < explodes else 11.4 if step < 7_220 else math.nan
        for step in range(1, steps + 1)
    ]
    return dynamic(safe, init=16, interval=1000, losses=losses)


def bigscience_13b() -> Iterator[StepRecord]:
    """BigScience 13B: 65536 -> 8192 -> 4096 within 20 steps of a spike.

    Source: the scales from the notes on that run; that it came near step 29,000 and
    that the run recovered from the chronicle of the 104B one. Taken on: the run is
    seen from 27,000 on; three overflows in a row, and one more ten steps later.
    """
    first, spike = 27_000, 29_000
    safe = [16.5] * 2_500
    safe[spike - first :] = [13.0] * 10 + [12.0] * 490
    return dynamic(safe, init=16, interval=4_000, first=first)


def opt_175b() -> Iterator[StepRecord]:
    """OPT-175B: scales drop until gradients underflow, then stand at the threshold.

    Source: metaseq, projects/OPT/chronicles; the threshold, 1e-4, is the default of
    its scaler. Taken on: from step 3,000 on the safe scale falls by one bit in thirty
    steps; window 2000.
    """
    falls, steps = 3_000, 4_200
    drawn = noise("gpt", random.Random(175), steps)
    safe = [
        17.0 + bits - max(0, index - falls) / 30.0 for index, bits in enumerate(drawn)
    ]
    return dynamic(safe, init=16, floor=-13)
