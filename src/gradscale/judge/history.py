"""The history of a run so far, in a fixed number of scalars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradscale.core.records import LOST_TOO_MUCH, StepRecord

# Finite steps in a row after which a run has found its scale, or has recovered.
SETTLED_AFTER = 10
# Finite steps from the first one on after which the initial scale fits: a later
# overflow is not calibration.
FITS_AFTER = 3
# Steps after the first finite one in which further overflows still count as
# calibration: batches with larger gradients come one by one.
SETTLING = 100
# Non-finite losses in a row that are more than a few bad batches. Live, records of
# PyTorch are two to five steps old: a run is stopped within thirteen.
MANY_LOSSES = 8
# Steps over which the loss is averaged.
LOSS_MEMORY = 20
# Factor by which the mean loss must exceed its minimum to count as rising.
RISEN = 1.5
# The same for two losses in a row while there are too few for a mean.
FAR_RISEN = 16.0
# The smallest normal float16. Below it precision is lost; the smallest is 2^-24.
SMALLEST_NORMAL = 2.0**-14


@dataclass(slots=True)
class Streak:
    """Consecutive steps of one kind.

    Attributes:
        length: Their number; set to 0 by a step of another kind.
        since: The first of them.
        origin: The scale before the first of them.
        nan: Steps among them with a NaN.
        held: Steps among them at the scale of the one before.
        last: The scale of the last of them.
        applied: Steps among them that were applied.
        skips: Skipped steps in a row, up to the last.
        after_nan: Steps after the last NaN.
    """

    length: int = 0
    since: int = 0
    origin: float = 0.0
    nan: int = 0
    held: int = 0
    last: float = 0.0
    applied: int = 0
    skips: int = 0
    after_nan: int = 0

    def extend(self, record: StepRecord, origin: float = 0.0) -> None:
        """Add a step. The first sets the origin: `origin`, or its own scale if 0."""
        if self.length == 0:
            self.since = record.step
            self.origin = origin or record.scale
            self.nan = self.held = self.applied = self.skips = self.after_nan = 0
        elif record.scale == self.last:
            self.held += 1
        self.length += 1
        self.nan += record.nan
        self.applied += record.applied
        self.skips = 0 if record.applied else self.skips + 1
        self.after_nan = 0 if record.nan else self.after_nan + 1
        self.last = record.scale


@dataclass(slots=True)
class History:
    """Counters and means over the steps of a run. Of fixed size.

    Attributes:
        step: The number of the last step.
        steps: Steps with gradients.
        first_step: The first of them.
        first_scale: Its scale.
        fits: The first ones were finite: the initial scale needs no calibration.
        settled: Calibration is over.
        settling: Steps since the first finite one, until settled.
        early_skips: Steps skipped during calibration.
        finite: Steps in a row with finite weights, loss, gradients and norm.
        good_scale: The scale of the last such step.
        healthy_at: The last step that ended ten of them in a row; 0 if there is none.
        bad: Steps whose loss was finite and whose gradients were not.
        loss: Steps whose loss was not finite.
        none: Steps without a gradient.
        tiny: Finite steps with no gradient among the float16 normals.
        lost: Sampled steps, not necessarily neighbours, that lost too much.
        loss_mean: Running mean of the finite losses.
        loss_low: The lowest such mean.
        losses: Finite losses read.
        loss_start: The first of them.
        loss_last: The last of them.
        loss_before: The one before it.
        loss_known: Some loss was finite, whether or not its value was read.
        loss_kind: "nan" or "inf", of the last loss that was not finite; empty if its
            value was not read.
        culprit: The first tensor that was not finite at the last skip; empty if
            unknown.
        culprits: The number of such tensors.
    """

    step: int = 0
    steps: int = 0
    first_step: int = 0
    first_scale: float = 0.0
    fits: bool = False
    settled: bool = False
    settling: int = 0
    early_skips: int = 0
    finite: int = 0
    good_scale: float = 0.0
    healthy_at: int = 0
    bad: Streak = field(default_factory=Streak)
    loss: Streak = field(default_factory=Streak)
    none: Streak = field(default_factory=Streak)
    tiny: Streak = field(default_factory=Streak)
    lost: Streak = field(default_factory=Streak)
    loss_mean: float = 0.0
    loss_low: float = 0.0
    losses: int = 0
    loss_start: float = 0.0
    loss_last: float = 0.0
    loss_before: float = 0.0
    loss_known: bool = False
    loss_kind: str = ""
    culprit: str = ""
    culprits: int = 0

    def add(self, record: StepRecord, culprits: Sequence[str]) -> None:
        """Add the next step."""
        self.step = record.step
        if not record.read:
            self.none.extend(record)
            return
        self.none.length = 0
        if self.steps == 0:
            self.first_step, self.first_scale = record.step, record.scale
            # A resumed run has already been calibrated.
            self.settled = record.calibrated
        self.steps += 1
        if record.loss is not None and math.isfinite(record.loss):
            self._add_loss(record.loss)
        if record.loss_finite:
            self.loss_known = True
            self.loss.length = 0
        else:
            self.loss_kind = _kind(record.loss)
            self.loss.extend(record)
        sound = record.weights_finite and record.loss_finite and record.norm_finite
        if not (sound and record.finite):
            self._add_bad(record, culprits)
        else:
            self.bad.length = 0
            self.finite += 1
            self.fits = self.fits or FITS_AFTER == self.steps == self.finite
            self.good_scale = record.scale
            if self.finite >= SETTLED_AFTER:
                self.healthy_at = record.step
            # An amax of 0 may mean that it was not read; a norm of 0 is always read.
            known = record.amax > 0.0 or record.grad_norm == 0.0
            if known and record.amax < SMALLEST_NORMAL:
                self.tiny.extend(record)
            else:
                self.tiny.length = 0
            if record.lost is not None and record.lost >= LOST_TOO_MUCH:
                self.lost.extend(record)
            elif record.lost is not None:
                self.lost.length = 0
        if not self.settled:
            self.settling += record.calibrated
            skipped = record.loss_finite and not record.finite
            self.early_skips += skipped and not self.fits
            late = self.settling >= SETTLING
            self.settled = late or self.finite >= SETTLED_AFTER

    def rising(self) -> bool:
        """Return whether the mean loss is well above its minimum."""
        enough = self.losses >= 2 * LOSS_MEMORY
        return enough and 0.0 < RISEN * self.loss_low < self.loss_mean

    def soared(self) -> bool:
        """Return whether the loss rose far within the first steps of the run."""
        young = 2 <= self.losses < 2 * LOSS_MEMORY
        lowest = min(self.loss_last, self.loss_before)
        return young and 0.0 < FAR_RISEN * self.loss_start <= lowest

    def _add_loss(self, loss: float) -> None:
        self.losses += 1
        if self.losses == 1:
            self.loss_start = loss
        self.loss_before, self.loss_last = self.loss_last, loss
        self.loss_mean += (loss - self.loss_mean) / min(self.losses, LOSS_MEMORY)
        if self.losses <= LOSS_MEMORY or self.loss_mean < self.loss_low:
            self.loss_low = self.loss_mean

    def _add_bad(self, record: StepRecord, culprits: Sequence[str]) -> None:
        self.finite = 0
        self.tiny.length = 0
        self.culprit = culprits[0] if culprits else ""
        self.culprits = len(culprits)
        known = record.finite or not (record.weights_finite and record.loss_finite)
        if known or not record.scaled_loss_finite:
            # The cause is not the scale: such steps are no evidence about other scales.
            self.bad.length = 0
        else:
            self.bad.extend(record, self.good_scale)


def _kind(loss: float | None) -> str:
    if loss is None or math.isfinite(loss):
        return ""
    return "nan" if math.isnan(loss) else "inf"
