"""The records of a run, rebuilt from its rows."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradscale.core.records import COLLAPSED_AFTER, LOST_TOO_MUCH, StepRecord, Verdict
from gradscale.runfile import StepRow

_OK = Verdict.OK.code
_LOST = Verdict.UNDERFLOW.code
_IDLE = Verdict.NO_GRADIENTS.code
_NORM = Verdict.NORM_OVERFLOW.code
_LOSS = Verdict.FORWARD_NONFINITE.code
_COLLAPSE = Verdict.COLLAPSE.code
_WEIGHTS = Verdict.WEIGHTS_NONFINITE.code
# Verdicts that are given only once some step was finite.
_LATER = (Verdict.PROBING.code, Verdict.OVERFLOW.code)
# Steps of these verdicts had nothing that was not finite.
_SOUND = (_OK, _LOST, _IDLE)

_new = tuple.__new__


class Bounds(NamedTuple):
    """The lowest and the highest scale that a policy allows."""

    floor: float
    ceiling: float


def bounds_of(meta: Mapping[str, Any]) -> Bounds | None:
    """Return the bounds of a run's policy; None if it has none or none are known.

    >>> bounds_of({"policy": {"min_scale": 1.0, "max_scale": 65536.0}})
    Bounds(floor=1.0, ceiling=65536.0)
    """
    policy = meta.get("policy")
    if not isinstance(policy, Mapping):
        return None
    low, high = policy.get("min_scale"), policy.get("max_scale")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    # A scale that cannot move has no floor to fall to.
    return Bounds(float(low), float(high)) if low < high else None


def is_skipped(row: StepRow) -> bool:
    """Tell whether a step was not taken though there were gradients.

    >>> is_skipped(StepRow(1, 0.0, 4.0, False, "GS203", None, None, None))
    True
    >>> is_skipped(StepRow(2, 0.0, 4.0, False, "GS103", None, None, None))
    False
    """
    return not (row.applied or row.verdict in _SOUND)


class Records:
    """Rebuilds records, one after the other, from rows in order.

    The verdict of a row says which of its facts made it; what a step inherits from
    those before it is counted again: whether one was finite, whether the scale was
    just raised, how often it did not fit at the floor. So a judge says of the file
    what it said live.

    >>> row = StepRow(1, 0.0, 65536.0, False, "GS206", None, None, 3.5)
    >>> record = Records().of(row)
    >>> record.scaled_loss_finite, record.loss_finite, record.calibrated
    (False, True, False)

    Args:
        floor: The lowest scale of the policy; if None, the scale of the first row
            that is called a collapse.
    """

    def __init__(self, floor: float | None = None) -> None:
        self._floor = floor
        self._begun = False
        self._calibrated = False
        self._scale = 0.0
        self._held = 0
        self._loss_finite = True

    def of(
        self, row: StepRow, nan: bool = False, lost: float | None = None
    ) -> StepRecord:
        """Return the record of the next row.

        Args:
            row: As the run file has it.
            nan: A peak of this step was NaN.
            lost: The share of elements that were too small; None if not sampled.
        """
        step, _, scale, applied, code, norm, amax, loss = row
        if not self._begun:
            self._begin(row)
        calibrated, grown = self._calibrated, scale > self._scale
        if code == _OK:
            self._calibrated = self._loss_finite = True
            self._scale, self._held = scale, 0
            # Nearly every row of a run: made without the checks of a call, which
            # would take twice as long.
            inherited = (calibrated, grown, 0, amax or 0.0, norm)
            facts = (step, scale, applied, True, True, True, True, *inherited)
            return _new(StepRecord, (*facts, True, True, False, loss, lost))
        record = StepRecord(
            step=step,
            scale=scale,
            applied=applied,
            finite=True,
            calibrated=calibrated,
            grown=grown or code == Verdict.PROBING.code,
            amax=amax or 0.0,
            grad_norm=norm,
            loss=loss,
        )
        if code == _IDLE:
            return record._replace(read=False)
        if code == _LOST:
            self._calibrated = self._loss_finite = True
            self._scale, self._held = scale, 0
            known = record.amax > 0.0 or norm == 0.0
            tiny = known and record.amax < 2.0**-14
            if lost is None and not tiny:
                lost = LOST_TOO_MUCH
            return record._replace(lost=lost)
        return self._skipped(row, record, nan)

    def _begin(self, row: StepRow) -> None:
        self._begun = True
        self._scale = row.scale
        # A run whose first row is not its first step was resumed.
        resumed = row.step > 1 and row.verdict != Verdict.CALIBRATING.code
        self._calibrated = resumed or row.verdict in _LATER

    def _skipped(self, row: StepRow, record: StepRecord, nan: bool) -> StepRecord:
        code, amax, loss = row.verdict, row.amax, row.loss
        self._held = self._held + 1 if self._held and row.scale == self._scale else 1
        self._scale = row.scale
        if code in (_COLLAPSE, _WEIGHTS):
            # These come before the loss: it is seen, or was so a step ago.
            known = loss is not None
            sound = math.isfinite(loss) if loss is not None else self._loss_finite
            loss_finite = sound if known or code == _COLLAPSE else True
        else:
            loss_finite = code != _LOSS
        self._loss_finite = loss_finite
        told = code in (_NORM, _LOSS, _WEIGHTS)
        finite = told and amax is not None and math.isfinite(amax)
        return record._replace(
            finite=finite or code == _NORM or row.applied,
            loss_finite=loss_finite,
            norm_finite=code != _NORM,
            floor_steps=self._floor_steps(row),
            scaled_loss_finite=code != Verdict.LOSS_OVERFLOW.code,
            weights_finite=code != _WEIGHTS,
            nan=nan or (amax is not None and math.isnan(amax)),
        )

    def _floor_steps(self, row: StepRow) -> int:
        if row.verdict == _COLLAPSE:
            if self._floor is None:
                self._floor = row.scale
            self._held = max(self._held, COLLAPSED_AFTER)
            return self._held
        at_floor = self._floor is not None and row.scale <= self._floor
        return self._held if at_floor else 0
