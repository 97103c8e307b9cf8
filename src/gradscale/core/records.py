"""Step records and their verdicts: one pure classifier, live and on files."""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """The verdict on one step; `code` is its entry in the catalogue.

    `GENUINE` needs several steps: only `gradscale.judge.judge` gives it.
    """

    OK = "GS000"
    CALIBRATING = "GS002"
    PROBING = "GS003"
    NO_GRADIENTS = "GS103"
    OVERFLOW = "GS201"
    COLLAPSE = "GS202"
    FORWARD_NONFINITE = "GS203"
    NORM_OVERFLOW = "GS204"
    LOSS_OVERFLOW = "GS206"
    WEIGHTS_NONFINITE = "GS207"
    GENUINE = "GS208"
    UNDERFLOW = "GS209"

    @property
    def code(self) -> str:
        """The code for `gradscale explain`."""
        return self.value

    def __str__(self) -> str:
        return self.name.lower()


class StepRecord(NamedTuple):
    """The record of one step, on the host.

    Attributes:
        step: The number of the `update()`, counted from 1.
        scale: The scale that multiplied the loss.
        applied: A step was applied and the gradients of all optimizers were finite.
        finite: Every gradient element was finite before and after unscaling.
        loss_finite: The loss was finite before it was scaled.
        norm_finite: The gradient norm, if it was computed, is a usable f32.
        read: At least one gradient was read.
        calibrated: Some earlier step was finite.
        grown: The scale had been raised by the step before this one.
        floor_steps: Steps in a row, this one included, that were not finite at the
            lowest scale the policy allows.
        amax: The largest magnitude among the scaled gradients.
        grad_norm: The norm of the unscaled gradients; None if it was not computed.
        scaled_loss_finite: The scaled loss was finite in its dtype.
        weights_finite: Every weight that was checked was finite.
        nan: A gradient was NaN, not only infinite.
        loss: The loss before it was scaled; None if it was not read.
        lost: The share of gradient elements too small for float16 at this scale;
            None if this step was not sampled.
        lost_layer: The name of the largest gradient that has lost most of its
            elements; empty if none has, or the step was not sampled.
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
    scaled_loss_finite: bool = True
    weights_finite: bool = True
    nan: bool = False
    loss: float | None = None
    lost: float | None = None
    lost_layer: str = ""


# One overflow at the floor may be one bad batch; three in a row are a collapse.
COLLAPSED_AFTER = 3
# Five recorded runs lost less than 0.02 percent of their elements at the largest scale
# that fits and at most 14 percent 16 bits below it. SSD lost 31 percent without a
# scale and diverged: https://arxiv.org/abs/1710.03740.
LOST_TOO_MUCH = 0.2


def classify(record: StepRecord) -> Verdict:
    """Return the verdict on one step from its record alone. Pure.

    >>> classify(StepRecord(step=1, scale=65536.0, applied=True, finite=True))
    <Verdict.OK: 'GS000'>
    """
    if not record.read:
        return Verdict.NO_GRADIENTS
    if record.floor_steps >= COLLAPSED_AFTER:
        return Verdict.COLLAPSE
    # Causes before their consequences: weights, loss, gradients, norm.
    if not record.weights_finite:
        return Verdict.WEIGHTS_NONFINITE
    if not record.loss_finite:
        return Verdict.FORWARD_NONFINITE
    if not record.finite:
        return _classify_overflow(record)
    if not record.norm_finite:
        return Verdict.NORM_OVERFLOW
    vanish = record.lost is not None and record.lost >= LOST_TOO_MUCH
    return Verdict.UNDERFLOW if vanish else Verdict.OK


def _classify_overflow(record: StepRecord) -> Verdict:
    if not record.scaled_loss_finite:
        return Verdict.LOSS_OVERFLOW
    if not record.calibrated:
        return Verdict.CALIBRATING
    return Verdict.PROBING if record.grown else Verdict.OVERFLOW
