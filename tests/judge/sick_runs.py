"""Sick runs of different causes, each with a healthy twin, as sequences of records.

Each function takes one argument, whether the run is sick, and changes nothing else.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gradscale import StepRecord
from tests.judge.histories import dynamic, healthy

STEPS = 400
GOOD = StepRecord(step=1, scale=2.0**16, applied=True, finite=True, amax=900.0)
BAD = GOOD._replace(applied=False, finite=False, amax=math.inf)


class Pattern(NamedTuple):
    """A run, and what a judge should say of it.

    Attributes:
        records: The run, sick or well.
        sick: The codes for the sick one, in order.
        well: The codes for its twin.
        hopeless: The sick one cannot mend itself.
        by: The step by which the last of the codes is said.
    """

    records: Callable[[bool], Iterator[StepRecord]]
    sick: tuple[str, ...]
    well: tuple[str, ...]
    hopeless: bool
    by: int


def numbered(change: Callable[[int], StepRecord]) -> Iterator[StepRecord]:
    """Yield a run whose steps follow from their number."""
    return (change(step)._replace(step=step) for step in range(1, STEPS + 1))


def loss_is_nan_from_step_100(sick: bool) -> Iterator[StepRecord]:
    losses = [math.nan if sick and step >= 100 else 2.0 for step in range(1, STEPS)]
    return dynamic([17.0] * len(losses), losses=losses)


def loss_is_nan_and_the_scale_is_held(sick: bool) -> Iterator[StepRecord]:
    lost = BAD._replace(loss_finite=False, loss=math.nan)
    return numbered(lambda step: lost if sick and step >= 100 else GOOD)


def loss_is_infinite_from_the_start(sick: bool) -> Iterator[StepRecord]:
    losses = [math.inf if sick else 2.0] * STEPS
    return dynamic([17.0] * STEPS, losses=losses)


def the_loss_is_a_sum_beyond_float16(sick: bool) -> Iterator[StepRecord]:
    """The gradients of the sum do not know, and the steps are taken."""
    beyond = GOOD._replace(loss_finite=False, loss=math.inf)
    return numbered(lambda step: beyond if sick and step >= 100 else GOOD)


def one_batch_is_poisoned(sick: bool) -> Iterator[StepRecord]:
    losses = [math.nan if sick and step == 100 else 2.0 for step in range(1, STEPS)]
    return dynamic([17.0] * len(losses), losses=losses)


def weights_are_ruined_at_step_200(sick: bool) -> Iterator[StepRecord]:
    ruined = BAD._replace(weights_finite=False, loss_finite=False, nan=True)
    return numbered(lambda step: ruined if sick and step >= 200 else GOOD)


def backward_gives_nan_from_step_100(sick: bool) -> Iterator[StepRecord]:
    safe = [-math.inf if sick and step >= 100 else 17.0 for step in range(1, STEPS)]
    return (record._replace(nan=not record.finite) for record in dynamic(safe))


def backward_gives_infinity_from_step_100(sick: bool) -> Iterator[StepRecord]:
    safe = [-math.inf if sick and step >= 100 else 17.0 for step in range(1, STEPS)]
    return dynamic(safe)


def backward_gives_nan_from_the_start(sick: bool) -> Iterator[StepRecord]:
    safe = [-math.inf if sick else 17.0] * STEPS
    return (record._replace(nan=not record.finite) for record in dynamic(safe))


def the_floor_is_too_high(sick: bool) -> Iterator[StepRecord]:
    """The safe scale drops to 2^10 at step 100; the floor is 2^12, or 2^-24."""
    safe = [17.0 if step < 100 else 11.0 for step in range(1, STEPS)]
    floor, init = (12, 14) if sick else (-24, 14)
    return dynamic(safe, init=init, floor=floor)


def a_fixed_scale_never_fits(sick: bool) -> Iterator[StepRecord]:
    too_high = BAD._replace(scale=2.0**32, calibrated=False)
    return numbered(lambda step: too_high if sick else GOOD)


def a_fixed_scale_fits_two_of_three(sick: bool) -> Iterator[StepRecord]:
    return numbered(lambda step: BAD if sick and step > 50 and step % 3 == 0 else GOOD)


def every_third_batch_overflows(sick: bool) -> Iterator[StepRecord]:
    """The rule forgives: scales 2^16 and 2^15 in turn, as with a hysteresis."""

    def change(step: int) -> StepRecord:
        low = step % 6 >= 3
        record = BAD if sick and step > 50 and step % 3 == 0 else GOOD
        return record._replace(scale=2.0**15 if low else 2.0**16)

    return numbered(change)


def the_loss_is_half_precision(sick: bool) -> Iterator[StepRecord]:
    """A loss of 3.5 times 2^16 does not fit into float16, times 2^14 it does."""
    for record in dynamic([14.5] * STEPS, losses=[3.5] * STEPS):
        yield record._replace(scaled_loss_finite=record.finite or not sick)


def gradients_vanish_at_scale_1(sick: bool) -> Iterator[StepRecord]:
    """The meter finds 41 percent lost, or 0.3 percent, in every 50th step."""
    lost = 0.41 if sick else 0.003
    step_of = GOOD._replace(scale=1.0 if sick else 2.0**12, amax=0.02)
    return numbered(lambda step: step_of._replace(lost=None if step % 50 else lost))


def no_gradient_reaches_the_normals(sick: bool) -> Iterator[StepRecord]:
    scale = 1.0 if sick else 2.0**12
    return numbered(lambda step: GOOD._replace(scale=scale, amax=2.0**-16 * scale))


def the_norm_overflows(sick: bool) -> Iterator[StepRecord]:
    beyond = GOOD._replace(applied=False, norm_finite=False)
    return numbered(lambda step: beyond if sick and step == 100 else GOOD)


def the_optimizer_holds_another_model(sick: bool) -> Iterator[StepRecord]:
    idle = GOOD._replace(read=False, applied=False, amax=0.0)
    return numbered(lambda step: idle if sick else GOOD)


def the_scale_falls_and_falls(sick: bool) -> Iterator[StepRecord]:
    safe = healthy("gpt", seed=1, steps=3000, drift=0.0)
    fall = 1.0 / 100.0 if sick else 0.0
    return dynamic([at - fall * max(0, i - 2500) for i, at in enumerate(safe)])


def gradients_grow_under_a_fixed_scale(sick: bool) -> Iterator[StepRecord]:
    """From step 250 on they double every ten steps, up to a quarter of 65504."""

    def change(step: int) -> StepRecord:
        doublings = min(9.0, max(0.0, step - 250) / 10.0) if sick else 0.0
        return GOOD._replace(amax=2.0 ** (5.0 + doublings))

    return numbered(change)


def losses_and_gradients_fail_by_turns(sick: bool) -> Iterator[StepRecord]:
    by_turns = (BAD._replace(nan=True), BAD._replace(loss_finite=False, loss=math.nan))
    return numbered(lambda step: by_turns[step % 2] if sick and step >= 100 else GOOD)


def now_and_then(sick: bool, times: int) -> Iterator[StepRecord]:
    """Yield a run in which gradients do not fit in some steps, 30 to 36 steps apart.

    Sick, nothing fits in them, and 15 bits are free in the others. Well, they are the
    tail of gradients that use the range: 2 bits are free in the others.
    """
    safe = [31.0 if sick else 17.0] * STEPS
    for number in range(1, times + 1):
        safe[30 * number + number**2 % 7] = -math.inf if sick else 14.5
    return dynamic(safe)


def gradients_are_nan_now_and_then(sick: bool) -> Iterator[StepRecord]:
    """Ten times within 310 steps: the scale falls from 2^16 to 2^6."""
    records = now_and_then(sick, times=10)
    return (record._replace(nan=not record.finite) for record in records)


def gradients_are_infinite_now_and_then(sick: bool) -> Iterator[StepRecord]:
    return now_and_then(sick, times=6)


def gradients_grew_since_the_first_steps(sick: bool) -> Iterator[StepRecord]:
    """By 8 bits within 160 steps, before a usual scale is known; or by 4."""
    bits = 8.0 if sick else 4.0
    steps = range(STEPS)
    return dynamic([17.0 - bits * min(1.0, step / 160.0) for step in steps])


def a_layer_gets_no_gradients(sick: bool) -> Iterator[StepRecord]:
    """A sample every 50 steps names it, with 10 bits unused, or with 4."""
    amax = 2.0 ** (6.0 if sick else 12.0)
    lost = GOOD._replace(lost=0.01, lost_layer="head.weight", amax=amax)
    return numbered(lambda step: GOOD._replace(amax=amax) if step % 50 else lost)


PATTERNS = (
    Pattern(loss_is_nan_from_step_100, ("GS203",), (), True, 109),
    Pattern(loss_is_nan_and_the_scale_is_held, ("GS203",), (), True, 109),
    Pattern(loss_is_infinite_from_the_start, ("GS203",), (), True, 10),
    Pattern(losses_and_gradients_fail_by_turns, ("GS203",), (), True, 109),
    Pattern(the_loss_is_a_sum_beyond_float16, ("GS203",), (), False, 107),
    Pattern(one_batch_is_poisoned, ("GS203",), (), False, 105),
    Pattern(weights_are_ruined_at_step_200, ("GS207",), (), True, 200),
    Pattern(backward_gives_nan_from_step_100, ("GS208",), (), True, 108),
    Pattern(backward_gives_infinity_from_step_100, ("GS208",), (), True, 110),
    Pattern(backward_gives_nan_from_the_start, ("GS208",), (), True, 25),
    Pattern(the_floor_is_too_high, ("GS202",), (), True, 104),
    Pattern(a_fixed_scale_never_fits, ("GS205",), (), False, 10),
    Pattern(a_fixed_scale_fits_two_of_three, ("GS205",), (), False, 108),
    Pattern(every_third_batch_overflows, ("GS201",), (), False, 108),
    Pattern(the_loss_is_half_precision, ("GS206", "GS001"), ("GS001",), False, 12),
    Pattern(gradients_vanish_at_scale_1, ("GS209",), (), False, 150),
    Pattern(no_gradient_reaches_the_normals, ("GS209",), (), False, 100),
    Pattern(a_layer_gets_no_gradients, ("GS209",), (), False, 200),
    Pattern(the_norm_overflows, ("GS204",), (), False, 100),
    Pattern(the_optimizer_holds_another_model, ("GS103",), (), False, 10),
    Pattern(the_scale_falls_and_falls, ("GS210",), (), False, 2904),
    Pattern(gradients_grow_under_a_fixed_scale, ("GS210",), (), False, 353),
    Pattern(gradients_grew_since_the_first_steps, ("GS210",), (), False, 151),
    Pattern(gradients_are_nan_now_and_then, ("GS211", "GS211"), (), False, 187),
    Pattern(gradients_are_infinite_now_and_then, ("GS211",), (), False, 160),
)
