"""Rebuilds the step records of a run from its rows."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradscale.core.records import COLLAPSED_AFTER, LOST_TOO_MUCH, StepRecord, Verdict
from gradscale.judge.history import SMALLEST_NORMAL
from gradscale.judge.verdict_table import (
    BY_CODE,
    Row,
    Skip,
    codes_where,
    verdicts_where,
)
from gradscale.runfile import StepRow

_IDLE = Verdict.NO_GRADIENTS.code
_COLLAPSE = Verdict.COLLAPSE.code
_WEIGHTS = Verdict.WEIGHTS_NONFINITE.code
_UNSKIPPED = tuple(v.code for v in verdicts_where(lambda row: not row.skipped))
_AFTER_FINITE = codes_where(lambda row: row.after_finite)
# A verdict of a newer version.
_UNKNOWN = Row(code="", skip=Skip.SCALE)


class Bounds(NamedTuple):
    """The lowest and the highest scale of a policy."""

    floor: float
    ceiling: float


def bounds_of(meta: Mapping[str, Any]) -> Bounds | None:
    """Return the bounds of a run's policy; None if it has none or they are unknown.

    >>> bounds_of({"policy": {"min_scale": 1.0, "max_scale": 65536.0}})
    Bounds(floor=1.0, ceiling=65536.0)
    """
    policy = meta.get("policy")
    if not isinstance(policy, Mapping):
        return None
    low, high = policy.get("min_scale"), policy.get("max_scale")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    # A fixed scale has no floor to fall to.
    return Bounds(float(low), float(high)) if 0.0 <= low < high < math.inf else None


def is_skipped(row: StepRow) -> bool:
    """Return whether a step was skipped although there were gradients.

    >>> is_skipped(StepRow(1, 0.0, 4.0, False, "GS203", None, None, None))
    True
    >>> is_skipped(StepRow(2, 0.0, 4.0, False, "GS103", None, None, None))
    False
    """
    return not (row.applied or row.verdict in _UNSKIPPED)


class Records:
    """Rebuilds records from rows, in the order of steps.

    The verdict of a row implies some fields of its record. Fields that depend on
    earlier steps are counted again: whether a step was finite before, whether the
    scale was just raised, steps at the floor. A judge thus gives the same findings for
    the file as live.

    >>> row = StepRow(1, 0.0, 65536.0, False, "GS206", None, None, 3.5)
    >>> record = Records().of(row)
    >>> record.scaled_loss_finite, record.loss_finite, record.calibrated
    (False, True, False)

    Args:
        floor: The lowest scale of the policy; if None, the scale of the first row
            whose verdict is a collapse.
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
            row: The next row of the run file.
            nan: A peak of this step was NaN.
            lost: The share of elements that were too small; None if not sampled.
        """
        if not self._begun:
            self._begin(row)
        record = StepRecord(
            step=row.step,
            scale=row.scale,
            applied=row.applied,
            finite=True,
            calibrated=self._calibrated,
            grown=row.scale > self._scale,
            amax=row.amax or 0.0,
            grad_norm=row.norm,
            loss=row.loss,
            lost=lost,
        )
        if row.verdict == _IDLE:
            return record._replace(lost=None, **BY_CODE[_IDLE].implies)
        if row.verdict not in _UNSKIPPED:
            return self._skipped(row, record, nan)
        self._calibrated = self._loss_finite = True
        self._scale, self._held = row.scale, 0
        if row.verdict == Verdict.UNDERFLOW.code and lost is None:
            known = record.amax > 0.0 or record.grad_norm == 0.0
            if not (known and record.amax < SMALLEST_NORMAL):
                return record._replace(lost=LOST_TOO_MUCH)
        return record

    def _begin(self, row: StepRow) -> None:
        self._begun = True
        self._scale = row.scale
        # A run whose first row is not its first step was resumed.
        resumed = row.step > 1 and row.verdict != Verdict.CALIBRATING.code
        self._calibrated = resumed or row.verdict in _AFTER_FINITE

    def _skipped(self, row: StepRow, record: StepRecord, nan: bool) -> StepRecord:
        properties, amax = BY_CODE.get(row.verdict, _UNKNOWN), row.amax
        self._held = self._held + 1 if self._held and row.scale == self._scale else 1
        self._scale = row.scale
        self._loss_finite = self._was_loss_finite(row, properties)
        # Weights, loss and norm may be bad beside finite gradients.
        amax_finite = amax is not None and math.isfinite(amax)
        finite = amax_finite and properties.skip is Skip.CAUSE
        implied: dict[str, Any] = {"finite": finite, **properties.implies}
        implied["finite"] = implied["finite"] or row.applied
        implied["loss_finite"] = self._loss_finite
        return record._replace(
            **implied,
            lost=None,
            floor_steps=self._floor_steps(row),
            nan=nan or (amax is not None and math.isnan(amax)),
        )

    def _was_loss_finite(self, row: StepRow, properties: Row) -> bool:
        if row.verdict in (_COLLAPSE, _WEIGHTS):
            # These verdicts take precedence over a non-finite loss.
            if row.loss is not None:
                return math.isfinite(row.loss)
            return self._loss_finite if row.verdict == _COLLAPSE else True
        return bool(properties.implies.get("loss_finite", True))

    def _floor_steps(self, row: StepRow) -> int:
        if row.verdict == _COLLAPSE:
            if self._floor is None:
                self._floor = row.scale
            self._held = max(self._held, COLLAPSED_AFTER)
            return self._held
        at_floor = self._floor is not None and row.scale <= self._floor
        return self._held if at_floor else 0
