"""Numbers the steps and keeps the facts that later records depend on."""

import math
from collections.abc import Sequence
from typing import Any

from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import Policy
from gradscale.core.records import COLLAPSED_AFTER, StepRecord
from gradscale.errors import ScaleCollapsed
from gradscale.mxnet.gradients import Reading


class StepLog:
    """The counts of a run and the outcome of its last step.

    Attributes:
        applied: Steps taken.
        skipped: Steps skipped because a value was not finite.
        calibrated: Some step was finite.
        grown: The last step raised the scale.
        floor_steps: Steps in a row that were not finite at the lowest scale.
        last: The outcome of the last step; None before the first.
    """

    def __init__(self) -> None:
        self.applied = self.skipped = self.idle = self.floor_steps = 0
        self.calibrated = self.grown = False
        self.last: StepOutcome | None = None

    def add(
        self,
        reading: Reading,
        policy: Policy,
        scales: tuple[float, float],
        *,
        losses: Sequence[Any] = (),
        grad_norm: float | None = None,
    ) -> StepRecord:
        """Enter one step and return its record.

        Args:
            reading: The gradients of the step, scaled.
            policy: Defines the bounds.
            scales: The scale of this step and that of the next one.
            losses: The losses before scaling, arrays; their mean is recorded.
            grad_norm: The norm of the unscaled gradients, if it was computed.
        """
        used, following = scales
        finite, read = reading.finite, bool(reading.peaks)
        # A scale that cannot move has no floor to fall to.
        if policy.min_scale < policy.max_scale and read:
            stuck = not finite and used <= policy.min_scale
            self.floor_steps = self.floor_steps + 1 if stuck else 0
        self.applied += read and finite
        self.skipped += not finite
        self.idle += not read
        mean = _mean(losses)
        scaled_finite = finite or all(
            math.isfinite(_largest(loss * used)) for loss in losses
        )
        record = StepRecord(
            step=self.applied + self.skipped + self.idle,
            scale=used,
            applied=read and finite,
            finite=finite,
            loss_finite=mean is None or math.isfinite(mean),
            read=read,
            calibrated=self.calibrated,
            grown=self.grown,
            floor_steps=self.floor_steps,
            amax=reading.amax,
            grad_norm=grad_norm,
            scaled_loss_finite=scaled_finite,
            nan=reading.nan,
            loss=mean,
        )
        self.calibrated |= record.applied
        self.grown = following > used
        culprits = tuple(reading.culprits)
        self.last = StepOutcome(lambda: record, lambda: culprits)
        return record


def raise_if_collapsed(
    record: StepRecord, culprits: Sequence[str], finding: str = ""
) -> None:
    """Raise if the scale is at its floor and steps are still skipped.

    Args:
        record: The last step.
        culprits: The names of the gradients that were not finite.
        finding: The text of the finding, which is not printed as well.

    Raises:
        ScaleCollapsed: Three steps in a row were not finite at the lowest scale.
    """
    if record.floor_steps < COLLAPSED_AFTER:
        return
    raise ScaleCollapsed(
        f"The scale has fallen to its floor of {record.scale:g} and the gradients were "
        f"still not finite, {record.floor_steps} steps in a row up to step "
        f"{record.step}: {', '.join(culprits[:5])}. A lower scale cannot help: the "
        "cause is in the model, the data or the loss. Every such step was skipped: the "
        "weights are those of the last applied step. Check the batch and the loss."
        + (f"\n{finding}" if finding else ""),
        code="GS202",
    )


def _mean(losses: Sequence[Any]) -> float | None:
    values = [value for loss in losses for value in _flat(loss).asnumpy().tolist()]
    return sum(values) / len(values) if values else None


def _largest(loss: Any) -> float:
    return float(_flat(loss).abs().max().asscalar())


def _flat(loss: Any) -> Any:
    return loss.as_nd_ndarray().astype("float64").reshape((-1,))
