"""The history of a run so far, and its episodes, in a fixed number of scalars."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradscale.core.records import COLLAPSED_AFTER, LOST_TOO_MUCH, StepRecord, Verdict
from gradscale.judge.trend import TOP, exponent
from gradscale.judge.verdict_table import verdicts_where

# Finite steps in a row that end an episode. A bad batch in every short epoch is many
# episodes, a scale that is raised too often is one.
ENDED_AFTER = 5
# Finite steps in a row after which a run has found its scale, or has recovered.
SETTLED_AFTER = 10
# Finite steps from the first one on after which the initial scale fits: a later
# overflow is not calibration.
FITS_AFTER = 3
# Steps after the first finite one in which further overflows still count as
# calibration: batches with larger gradients come one by one.
SETTLING = 100
# Steps over which the loss is averaged.
LOSS_MEMORY = 20
# Factor by which the mean loss must exceed its minimum to count as rising.
RISEN = 1.5
# The same for two losses in a row while there are too few for a mean.
FAR_RISEN = 16.0
# The smallest normal float16. Below it precision is lost; the smallest is 2^-24.
SMALLEST_NORMAL = 2.0**-14
# Finite steps over which the largest gradient is kept, at least.
PEAK_MEMORY = 100
# Samples in which one layer lost its gradients before a finding; fewer if a cast is
# known to flush them and headroom is unused.
VANISHED_LAYER = 4
SUSPECT_LAYER = 2
UNUSED_BITS = 8.0
# Finite steps that give the gradients of the beginning, and of the present.
FIRST_STEPS = 20
# Steps at a new scale in which an overflow is attributed to that scale.
FRESH_STEPS = 3
# Bits of headroom that rule out the scale as the cause even during calibration. Weight
# gradients have unused headroom where those of activations overflow first.
AMPLE_BITS = 12.0
_IDLE = Verdict.NO_GRADIENTS.code
_COLLAPSE = Verdict.COLLAPSE.code
UNSKIPPED = tuple(v.code for v in verdicts_where(lambda row: not row.skipped))


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


class StepSequence:
    """Recomputes, over all records of a run, the fields that depend on earlier steps.

    Whether a step was finite before, whether the scale was just raised, steps at the
    floor: a run file has no such fields, and each of several scalers counts only its
    own steps. A judge thus gives the same findings for the file as live.

    >>> steps = StepSequence()
    >>> first, second = StepRecord(1, 8.0, True, True), StepRecord(2, 32.0, True, True)
    >>> [steps.place(record, "GS000").grown for record in (first, second)]
    [False, True]

    Args:
        meta: The metadata of the run. If its policy has no lowest scale, that is the
            scale of the first collapse.
    """

    def __init__(self, meta: Mapping[str, Any] | None = None) -> None:
        bounds = bounds_of(meta or {})
        self._floor = None if bounds is None else bounds.floor
        self._begun = False
        self._calibrated = False
        self._scale = 0.0
        self._held = 0

    def place(self, record: StepRecord, verdict: str) -> StepRecord:
        """Return the next record, as one of all steps of the run.

        Args:
            record: `calibrated` counts for the first one.
            verdict: The code of the verdict on it.
        """
        if not self._begun:
            self._begun = True
            self._scale, self._calibrated = record.scale, record.calibrated
        grown, before = record.scale > self._scale, self._scale
        record = record._replace(
            calibrated=self._calibrated, grown=grown, floor_steps=0
        )
        if verdict == _IDLE:
            return record
        self._scale = record.scale
        if verdict in UNSKIPPED:
            self._calibrated, self._held = True, 0
            return record
        self._held = self._held + 1 if self._held and record.scale == before else 1
        if verdict == _COLLAPSE:
            self._floor = record.scale if self._floor is None else self._floor
            self._held = max(self._held, COLLAPSED_AFTER)
        at_floor = self._floor is not None and record.scale <= self._floor
        stuck = at_floor or verdict == _COLLAPSE
        return record._replace(floor_steps=self._held if stuck else 0)


@dataclass(slots=True)
class Streak:
    """Consecutive steps of one kind.

    Attributes:
        length: Their number; set to 0 by a step of another kind.
        since: The first of them.
    """

    length: int = 0
    since: int = 0

    def add(self, step: int, holds: bool) -> None:
        """Count a step of this kind, or end the streak."""
        if not holds:
            self.length = 0
            return
        if self.length == 0:
            self.since = step
        self.length += 1


@dataclass(slots=True)
class Episode:
    """Lost steps with fewer than five finite ones between two of them.

    A step counts as lost if it was skipped although there were gradients, or if its
    loss was not finite.

    Attributes:
        since: The first lost step.
        last: The last lost step.
        scale_from: The scale of the last finite step before it; its own if there is
            none.
        scale: The scale of the last lost step.
        lowest: The lowest scale of a lost step.
        lost: Lost steps.
        applied: Lost steps that were applied: their loss was not finite, their
            gradients were.
        lost_in_row: Lost steps in a row, up to the last.
        finite: Finite steps since the last lost one.
        taken: Finite steps between lost ones.
        losses: Steps with a non-finite loss.
        loss_row: Such steps in a row that were skipped.
        loss_kind: "nan" or "inf", of the last such loss; empty if it was not read.
        gradients: Steps with a finite loss and non-finite gradients.
        gradient_row: Such steps in a row.
        nan: Steps of `gradient_row` with a NaN.
        after_nan: Steps of `gradient_row` after the last NaN.
        same_scale: Steps of `gradient_row` at the scale of the one before.
        row_from: The scale before the first step of `gradient_row`.
        scaled_losses: Steps whose scaled loss overflowed.
        norms: Steps whose norm overflowed.
        weights: Steps with a non-finite weight.
        headroom: Bits between the largest gradient of the recent finite steps and
            65504, at the scale of the first lost step; None if unknown.
        raised: The first lost step was among the first at a scale that was raised.
        new_scale: It was among the first at another new scale, or in the calibration.
        scale_excluded: An observed location is unrelated to the scale.
        headroom_skips: Steps of the episode that were not finite although the gradients
            of finite steps leave `AMPLE_BITS` of headroom, up to the last.
        headroom_from: The scale of the first of them.
        culprit: The first tensor that was not finite at the last skip.
        culprits: The number of such tensors.
        reported: The codes of the findings on it.
        hopeless: One of them is hopeless.
    """

    since: int
    scale_from: float
    headroom: float | None
    raised: bool
    new_scale: bool
    scale_excluded: bool = False
    last: int = 0
    scale: float = 0.0
    lowest: float = math.inf
    lost: int = 0
    applied: int = 0
    lost_in_row: int = 0
    finite: int = 0
    taken: int = 0
    losses: int = 0
    loss_row: int = 0
    loss_kind: str = ""
    gradients: int = 0
    gradient_row: int = 0
    nan: int = 0
    after_nan: int = 0
    same_scale: int = 0
    row_from: float = 0.0
    scaled_losses: int = 0
    norms: int = 0
    weights: int = 0
    headroom_skips: int = 0
    headroom_from: float = 0.0
    culprit: str = ""
    culprits: int = 0
    reported: tuple[str, ...] = ()
    hopeless: bool = False

    @property
    def steps(self) -> int:
        """All steps of the episode, up to the last lost one."""
        return self.lost + self.taken

    @property
    def bits(self) -> float:
        """By how many bits the scale has fallen since the episode began."""
        return exponent(self.scale_from) - exponent(self.lowest)

    @property
    def bits_lost_with_headroom(self) -> float:
        """By how many bits the scale has fallen over the `headroom_skips` steps."""
        return exponent(self.headroom_from) - exponent(self.lowest)

    @property
    def row_bits(self) -> float:
        """By how many bits the scale has fallen over `gradient_row`."""
        return exponent(self.row_from) - exponent(self.scale)

    def add_finite(self) -> bool:
        """Add a finite step; return whether the episode has ended."""
        self.finite += 1
        self.lost_in_row = self.loss_row = self.gradient_row = 0
        return self.finite >= ENDED_AFTER

    def add_lost(
        self, record: StepRecord, culprits: Sequence[str], headroom: float | None
    ) -> None:
        """Add a lost step.

        Args:
            record: The record of the step.
            culprits: The names of the tensors that were not finite.
            headroom: As in `headroom`, at the scale of this step.
        """
        self.taken += self.finite
        self.finite = 0
        self.last = record.step
        self.lost += 1
        self.lost_in_row += 1
        self.applied += record.applied
        self.culprit = culprits[0] if culprits else ""
        self.culprits = len(culprits)
        self.weights += not record.weights_finite
        self.norms += record.finite and not record.norm_finite
        self.scaled_losses += not record.scaled_loss_finite
        if record.loss_finite:
            self.loss_row = 0
        else:
            self.losses += 1
            self.loss_row = 0 if record.applied else self.loss_row + 1
            self.loss_kind = _kind(record.loss)
        if _by_gradients(record):
            self._add_gradients(record)
            if headroom is not None and headroom >= AMPLE_BITS and not record.grown:
                self.headroom_skips += 1
                self.headroom_from = self.headroom_from or record.scale
        else:
            # A cause other than the scale: no evidence about other scales.
            self.gradient_row = 0
        self.scale = record.scale
        self.lowest = min(self.lowest, record.scale)

    def _add_gradients(self, record: StepRecord) -> None:
        self.gradients += 1
        if self.gradient_row == 0:
            self.row_from = self.scale or self.scale_from
            self.nan = self.after_nan = self.same_scale = 0
        else:
            self.same_scale += record.scale == self.scale
        self.gradient_row += 1
        self.nan += record.nan
        self.after_nan = 0 if record.nan else self.after_nan + 1


def _by_gradients(record: StepRecord) -> bool:
    sound = record.weights_finite and record.loss_finite
    return sound and record.scaled_loss_finite and not record.finite


def _kind(loss: float | None) -> str:
    if loss is None or math.isfinite(loss):
        return ""
    return "nan" if math.isnan(loss) else "inf"


@dataclass(slots=True)
class Scattered:
    """Short episodes of one kind that the run recovered from by itself.

    Attributes:
        times: Their number.
        lost: The steps skipped in them.
        since: The first lost step.
        last: The last lost step.
        nan: Episodes with a NaN.
        gap: Steps between the last two.
        equal_gaps: Gaps in a row of that length.
        highest, lowest: The scales at which they occurred.
        headroom: The least headroom before one of them; None if unknown.
    """

    times: int = 0
    lost: int = 0
    since: int = 0
    last: int = 0
    nan: int = 0
    gap: int = 0
    equal_gaps: int = 0
    highest: float = 0.0
    lowest: float = math.inf
    headroom: float | None = None

    @classmethod
    def of(cls, episode: Episode) -> "Scattered":
        """Return the `headroom_skips` steps of one episode alone."""
        return cls(
            times=1,
            lost=episode.headroom_skips,
            since=episode.since,
            nan=episode.nan > 0,
            highest=episode.headroom_from,
            lowest=episode.lowest,
            headroom=AMPLE_BITS,
        )

    def add(self, episode: Episode) -> None:
        """Add an episode that has ended."""
        gap = episode.since - self.last if self.times else 0
        self.equal_gaps = self.equal_gaps + 1 if gap and gap == self.gap else 0
        self.gap = gap
        self.times += 1
        self.lost += episode.lost - episode.applied
        self.since = self.since or episode.since
        self.last = episode.since
        self.nan += episode.nan > 0 or episode.loss_kind == "nan"
        self.highest = max(self.highest, episode.scale)
        self.lowest = min(self.lowest, episode.lowest)
        if episode.headroom is not None:
            least = episode.headroom if self.headroom is None else self.headroom
            self.headroom = min(episode.headroom, least)

    @property
    def every(self) -> int:
        """The interval of the episodes, if it is always the same; else 0."""
        return self.gap if self.equal_gaps >= 1 and self.gap >= 5 else 0


@dataclass(slots=True)
class History:
    """Counters and means over the steps of a run. Of fixed size.

    Attributes:
        step: The number of the last step.
        steps: Steps with gradients.
        taken: Steps that were applied with finite weights, loss and gradients.
        first_step: The first step with gradients.
        first_scale: Its scale.
        fits: The first ones were finite: the initial scale needs no calibration.
        settled: Calibration is over.
        settling: Steps since the first finite one, until settled.
        early_skips: Steps skipped during calibration.
        finite: Finite steps in a row.
        at_scale: Finite steps in a row at the present scale.
        raised: The scale was raised when it last moved.
        good_scale: The scale of the last finite step.
        good_log2: Its log2.
        healthy_at: The last step that ended ten finite ones in a row; 0 if there is
            none.
        no_gradients: Steps without a gradient.
        tiny: Finite steps with no gradient among the float16 normals.
        lost: Sampled steps, not necessarily neighbours, that lost too much.
        loss_mean: Running mean of the finite losses.
        loss_low: The lowest such mean.
        losses: Finite losses read.
        loss_start: The first of them.
        loss_last: The last of them.
        loss_before: The one before it.
        layer: A layer whose gradients were lost in the last sample; empty if none.
        layer_samples: Samples in a row in which it was that layer.
        layer_since: The first of them.
        layer_sinking: Those up to the last with unused headroom, and with gradients
            close to the smallest float16: gradients of exactly 0 may have another
            cause.
        fitting_scale: The highest scale of ten finite steps in a row.
        size_start: Mean of log2 of the largest unscaled gradient, over the first steps.
        size: The same over the last ones.
        sizes: Finite steps with a gradient.
        top, top_before: log2 of the largest unscaled gradient in this window of finite
            steps, and in the one before.
        in_window: Finite steps in this window.
    """

    step: int = 0
    steps: int = 0
    taken: int = 0
    first_step: int = 0
    first_scale: float = 0.0
    fits: bool = False
    settled: bool = False
    settling: int = 0
    early_skips: int = 0
    finite: int = 0
    at_scale: int = 0
    raised: bool = False
    good_scale: float = 0.0
    good_log2: float = exponent(0.0)
    healthy_at: int = 0
    no_gradients: Streak = field(default_factory=Streak)
    tiny: Streak = field(default_factory=Streak)
    lost: Streak = field(default_factory=Streak)
    loss_mean: float = 0.0
    loss_low: float = 0.0
    losses: int = 0
    loss_start: float = 0.0
    loss_last: float = 0.0
    loss_before: float = 0.0
    layer: str = ""
    layer_samples: int = 0
    layer_since: int = 0
    layer_sinking: int = 0
    fitting_scale: float = 0.0
    size_start: float = 0.0
    size: float = 0.0
    sizes: int = 0
    top: float = -math.inf
    top_before: float = -math.inf
    in_window: int = 0

    def add_idle(self, step: int) -> None:
        """Add a step without a gradient."""
        self.step = step
        self.no_gradients.add(step, True)

    def add(self, record: StepRecord, *, lost: bool) -> None:
        """Add the next step with gradients.

        Args:
            record: The record of the step.
            lost: See `Episode`.
        """
        self.step = record.step
        self.no_gradients.length = 0
        if self.steps == 0:
            self.first_step, self.first_scale = record.step, record.scale
            # A resumed run has already been calibrated.
            self.settled = record.calibrated
        self.steps += 1
        loss = record.loss
        if loss is not None and math.isfinite(loss):
            self.losses += 1
            if self.losses == 1:
                self.loss_start = loss
            self.loss_before, self.loss_last = self.loss_last, loss
            self.loss_mean += (loss - self.loss_mean) / min(self.losses, LOSS_MEMORY)
            if self.losses <= LOSS_MEMORY or self.loss_mean < self.loss_low:
                self.loss_low = self.loss_mean
        if lost:
            self.finite = self.at_scale = self.tiny.length = 0
        else:
            self._add_finite(record)
        if not self.settled:
            self.settling += record.calibrated
            skipped = record.loss_finite and not record.finite
            self.early_skips += skipped and not self.fits
            late = self.settling >= SETTLING
            self.settled = late or self.finite >= SETTLED_AFTER

    def headroom(self, scale: float) -> float | None:
        """Return the bits between the largest recent gradient and 65504 at a scale.

        None before the first finite step.
        """
        top = max(self.top, self.top_before)
        return None if top == -math.inf else TOP - (top + exponent(scale))

    def has_room(self, scale: float) -> bool:
        """Return whether a scale leaves headroom unused."""
        headroom = self.headroom(scale)
        return headroom is not None and headroom >= UNUSED_BITS

    def amplification(self) -> float:
        """Return the bits by which the largest recent gradient exceeds the loss."""
        top = max(self.top, self.top_before)
        if not self.losses or top == -math.inf:
            return 0.0
        return top - exponent(abs(self.loss_last))

    def rising(self) -> bool:
        """Return whether the mean loss is well above its minimum."""
        enough = self.losses >= 2 * LOSS_MEMORY
        return enough and 0.0 < RISEN * self.loss_low < self.loss_mean

    def soared(self) -> bool:
        """Return whether the loss rose far within the first steps of the run."""
        young = 2 <= self.losses < 2 * LOSS_MEMORY
        lowest = min(self.loss_last, self.loss_before)
        return young and 0.0 < FAR_RISEN * self.loss_start <= lowest

    def _add_finite(self, record: StepRecord) -> None:
        if record.scale == self.good_scale:
            self.at_scale += 1
        else:
            self.at_scale, self.good_log2 = 1, exponent(record.scale)
            self.raised = record.scale > self.good_scale > 0.0
        self.finite += 1
        self.taken += record.applied
        if self.finite == self.steps == FITS_AFTER:
            self.fits = True
        self.good_scale = record.scale
        if self.finite >= SETTLED_AFTER:
            self.healthy_at = record.step
            self.fitting_scale = max(self.fitting_scale, record.scale)
        # An amax of 0 may mean that it was not read; a norm of 0 is always read.
        known = record.amax > 0.0 or record.grad_norm == 0.0
        if known and record.amax < SMALLEST_NORMAL:
            self.tiny.add(record.step, True)
        else:
            self.tiny.length = 0
        if record.lost is not None:
            self.lost.add(record.step, record.lost >= LOST_TOO_MUCH)
            self._add_layer(record)
        if 0.0 < record.amax < math.inf:
            if self.in_window >= PEAK_MEMORY:
                self.top_before, self.top, self.in_window = self.top, -math.inf, 0
            self.in_window += 1
            size = math.log2(record.amax) - self.good_log2
            self.top = max(self.top, size)
            self.sizes += 1
            self.size += (size - self.size) / min(self.sizes, FIRST_STEPS)
            if self.sizes <= FIRST_STEPS:
                self.size_start = self.size

    def _add_layer(self, record: StepRecord) -> None:
        """Count a sampled step in which a layer has lost its gradients."""
        if record.lost_layer != self.layer:
            self.layer, self.layer_since = record.lost_layer, record.step
            self.layer_samples = self.layer_sinking = 0
        if self.layer:
            self.layer_samples += 1
            sinking = self.has_room(record.scale) and bool(record.lost)
            self.layer_sinking = self.layer_sinking + 1 if sinking else 0
