"""What a step's record means: one pure classifier, live and on files."""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """The judgement on one step; `code` is its entry in the catalogue."""

    OK = "GS000"
    CALIBRATING = "GS002"
    PROBING = "GS003"
    NO_GRADIENTS = "GS103"
    OVERFLOW = "GS201"
    COLLAPSE = "GS202"
    FORWARD_NONFINITE = "GS203"
    NORM_OVERFLOW = "GS204"

    @property
    def code(self) -> str:
        """The code that `gradscale explain` knows."""
        return self.value

    def __str__(self) -> str:
        return self.name.lower()


class StepRecord(NamedTuple):
    """One step's facts, on the host.

    Attributes:
        step: Which `update()` this was, counted from 1.
        scale: The scale that multiplied the loss.
        applied: A step was taken and no optimizer's gradients were bad.
        finite: Every gradient element was finite and stayed so when unscaled.
        loss_finite: The loss was finite before it was scaled.
        norm_finite: The gradient norm, if one was asked for, is a usable f32.
        read: Some gradient was read at all.
        calibrated: A finite step had been seen before this one.
        grown: The scale had been raised by the step before this one.
        floor_steps: Steps in a row, this one included, that were not finite at the
            lowest scale the policy allows.
        amax: The largest magnitude among the scaled gradients.
        grad_norm: The norm of the unscaled gradients; None if nobody asked for it.
    """

    step: int
    scale: float
    applied: bool
    finite: bool
    loss_finite: bool = True
    norm_finite: bool = True
    read: bool = True
    calibrated: bool = True
    grown: bool = False
    floor_steps: int = 0
    amax: float = 0.0
    grad_norm: float | None = None


# One overflow at the floor may be one bad batch; three in a row are not.
COLLAPSED_AFTER = 3


def classify(record: StepRecord) -> Verdict:
    """Judge one step from its record alone. Pure.

    >>> classify(StepRecord(step=1, scale=65536.0, applied=True, finite=True))
    <Verdict.OK: 'GS000'>
    """
    if not record.read:
        return Verdict.NO_GRADIENTS
    if record.floor_steps >= COLLAPSED_AFTER:
        return Verdict.COLLAPSE
    if not record.loss_finite:
        return Verdict.FORWARD_NONFINITE
    if record.finite:
        return Verdict.OK if record.norm_finite else Verdict.NORM_OVERFLOW
    if not record.calibrated:
        return Verdict.CALIBRATING
    return Verdict.PROBING if record.grown else Verdict.OVERFLOW
