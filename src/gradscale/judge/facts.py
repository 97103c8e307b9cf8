"""What a finding can stand on, and the evidence that several findings share."""

from typing import Any, NamedTuple

from gradscale.core.records import StepRecord
from gradscale.judge.history import Course, Streak
from gradscale.judge.trend import Slope


class Facts(NamedTuple):
    """All that a finding can stand on.

    Attributes:
        record: The step at hand.
        course: The run up to it, this step included.
        slope: Where scale and gradients were heading before it.
        tensors: How many gradient tensors the run has; 0 if unknown.
    """

    record: StepRecord
    course: Course
    slope: Slope
    tensors: int


def who(facts: Facts) -> dict[str, Any]:
    """Return the tensors that were not finite at the last skip."""
    course = facts.course
    seen: dict[str, Any] = {}
    if course.culprit:
        seen = {"culprit": course.culprit, "culprits": course.culprits}
        if facts.tensors:
            seen["tensors"] = facts.tensors
    return seen


def trend(facts: Facts, since: int) -> dict[str, Any]:
    """Return what had grown before, if anything had, and when all was usual."""
    course = facts.course
    if course.soared():
        # From the start on nothing was usual.
        return {"loss_start": course.loss_start, "loss_last": course.loss_last}
    seen: dict[str, Any] = {}
    if course.rising():
        low, mean, start = course.loss_low, course.loss_mean, course.loss_start
        seen = {"loss_low": low, "loss_mean": mean, "loss_start": start}
    if facts.slope.growth() >= 1.0:
        seen["gradients_grown_bits"] = round(facts.slope.growth(), 2)
    if seen:
        seen["usual_before"] = usual_before(facts, since)
    return seen


def usual_before(facts: Facts, since: int) -> int:
    """Return the step at which the scale left its place, `since` if it did not."""
    return min(since, facts.slope.since) if facts.slope.since else since


def kind_of(run: Streak) -> str:
    """Return what was not finite in a row of steps, as an adjective.

    >>> kind_of(Streak(length=9, nan=9)), kind_of(Streak(length=9, nan=2))
    ('NaN', 'NaN or infinite')
    """
    if run.nan == run.length:
        return "NaN"
    return "NaN or infinite" if run.nan else "infinite"
