"""Rebuilds the step records of a run from its rows."""

import math
from collections.abc import Mapping
from typing import Any

from gradscale.core.records import LOST_TOO_MUCH, StepRecord, Verdict
from gradscale.judge.history import SMALLEST_NORMAL, UNSKIPPED, StepSequence
from gradscale.judge.verdict_table import BY_CODE, Row, Skip, codes_where
from gradscale.runfile import StepRow

_IDLE = Verdict.NO_GRADIENTS.code
_COLLAPSE = Verdict.COLLAPSE.code
_WEIGHTS = Verdict.WEIGHTS_NONFINITE.code
_AFTER_FINITE = codes_where(lambda row: row.after_finite)
# A verdict of a newer version.
_UNKNOWN = Row(code="", skip=Skip.SCALE)


def is_skipped(row: StepRow) -> bool:
    """Return whether a step was skipped although there were gradients.

    >>> is_skipped(StepRow(1, 0.0, 4.0, False, "GS203", None, None, None))
    True
    >>> is_skipped(StepRow(2, 0.0, 4.0, False, "GS103", None, None, None))
    False
    """
    return not (row.applied or row.verdict in UNSKIPPED)


class Records:
    """Rebuilds records from rows, in the order of steps.

    The verdict of a row implies some fields of its record; `StepSequence` counts those
    that depend on earlier steps.

    >>> row = StepRow(1, 0.0, 65536.0, False, "GS206", None, None, 3.5)
    >>> record = Records().of(row)
    >>> record.scaled_loss_finite, record.loss_finite, record.calibrated
    (False, True, False)

    Args:
        meta: The metadata of the run.
    """

    def __init__(self, meta: Mapping[str, Any] | None = None) -> None:
        self._sequence = StepSequence(meta)
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
        # A run whose first row is not its first step was resumed.
        resumed = row.step > 1 and row.verdict != Verdict.CALIBRATING.code
        record = StepRecord(
            step=row.step,
            scale=row.scale,
            applied=row.applied,
            finite=True,
            calibrated=resumed or row.verdict in _AFTER_FINITE,
            amax=row.amax or 0.0,
            grad_norm=row.norm,
            loss=row.loss,
            lost=lost,
        )
        record = self._sequence.place(record, row.verdict)
        if row.verdict == _IDLE:
            return record._replace(lost=None, **BY_CODE[_IDLE].implies)
        if row.verdict not in UNSKIPPED:
            return self._skipped(row, record, nan)
        self._loss_finite = True
        if row.verdict == Verdict.UNDERFLOW.code and lost is None:
            known = record.amax > 0.0 or record.grad_norm == 0.0
            if not (known and record.amax < SMALLEST_NORMAL):
                return record._replace(lost=LOST_TOO_MUCH)
        return record

    def _skipped(self, row: StepRow, record: StepRecord, nan: bool) -> StepRecord:
        properties, amax = BY_CODE.get(row.verdict, _UNKNOWN), row.amax
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
            nan=nan or (amax is not None and math.isnan(amax)),
        )

    def _was_loss_finite(self, row: StepRow, properties: Row) -> bool:
        if row.verdict in (_COLLAPSE, _WEIGHTS):
            # These verdicts take precedence over a non-finite loss.
            if row.loss is not None:
                return math.isfinite(row.loss)
            return self._loss_finite if row.verdict == _COLLAPSE else True
        return bool(properties.implies.get("loss_finite", True))
