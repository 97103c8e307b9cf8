"""Detects a falling scale and shrinking headroom (GS210)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gradscale.core.records import StepRecord

# log2 of 65504, the largest float16.
TOP = math.log2(65504.0)
# The usual value is a mean over this many steps: longer than a few cycles of
# growth_interval=2000, shorter than the phases of a long run.
MEMORY = 5000
# Steps in the mean of the present gradient, which differs from batch to batch.
RECENT = 20
# Steps before a usual value is known.
WARM = 200
# An alarm needs a fall of this many backoffs below the usual scale, and of this many
# times the deepest swing so far. Healthy recorded runs swing by up to three.
FALL = 3.5
DEEPER = 2.0
# Factor on the deepest swing after another MEMORY steps: deep swings are rare.
FADE = 0.9
# A headroom alarm needs this growth of gradients, and at most this headroom, in bits.
RISE = 4.0
NEAR = 3.0


def exponent(scale: float) -> float:
    """Return log2 of a scale; 0, NaN and infinity are clamped.

    >>> exponent(1024.0), exponent(0.0)
    (10.0, -150.0)
    """
    # In this order a NaN becomes the lower bound. Both bounds are beyond any f32.
    return math.log2(min(max(2.0**-150, scale), 2.0**128))


class Alarm(NamedTuple):
    """One early warning.

    Attributes:
        signal: "scale", which has fallen, "headroom", which is nearly used up, or
            "gradients", which have grown since the first steps.
        step: The step of the alarm.
        since: The step after the last one with usual values.
        usual: The mean of log2 of the scale, or of the largest unscaled gradient.
        now: The same at this step.
    """

    signal: str
    step: int
    since: int
    usual: float
    now: float

    @property
    def bits(self) -> float:
        """The deviation of the value from its usual one."""
        return abs(self.now - self.usual)


@dataclass(slots=True)
class Trend:
    """Slow averages of log2 of the scale and of the largest gradient.

    The scale alarm compares the scale with its mean over the last 5000 steps. Growth
    and backoff keep the scale within a few backoffs of that mean, and the depth of
    these swings is learned; a run that is about to diverge falls deeper. The headroom
    alarm compares the largest unscaled gradient with its own mean, and fires when it
    has grown and float16 is nearly full. Each fires once, and again when the fall is
    twice as deep or after a return to the usual value.

    The state is a dozen scalars, however long the run.

    >>> trend = Trend()
    >>> healthy = StepRecord(step=1, scale=65536.0, applied=True, finite=True)
    >>> for step in range(1, 1001):
    ...     assert trend.add(healthy._replace(step=step)) is None
    >>> for halvings in range(1, 5):
    ...     scale = 2.0 ** (16 - halvings)
    ...     alarm = trend.add(healthy._replace(step=1000 + halvings, scale=scale))
    >>> alarm.signal, alarm.since, round(alarm.bits, 2)
    ('scale', 1001, 3.99)
    """

    steps: int = 0
    scale: float = 0.0
    usual: float = 0.0
    last: float = exponent(0.0)
    unit: float = 1.0
    excused: bool = False
    since: int = 0
    asked: float = FALL
    swing: float = 0.0
    normal_swing: float = 0.0
    read: int = 0
    usual_gradient: float = 0.0
    gradient: float = 0.0
    gradient_since: int = 0
    grown: bool = False

    def add(self, record: StepRecord, *, blamed: bool = False) -> Alarm | None:
        """Add the next step; return an alarm if one is due.

        Args:
            record: The record of the step.
            blamed: The step was skipped for a known cause other than the scale. The
                backoff after it is then no sign of a fall.
        """
        now = self.last
        if record.scale != self.scale:
            self.scale, now = record.scale, exponent(record.scale)
        alarm = self._watch_scale(record, now)
        self.excused = blamed
        if record.finite and 0.0 < record.amax < math.inf:
            alarm = self._watch_headroom(record, now) or alarm
        return alarm

    def growth(self) -> float:
        """Return by how many bits gradients are above their usual size."""
        return self.gradient - self.usual_gradient if self.read >= WARM else 0.0

    def _watch_scale(self, record: StepRecord, now: float) -> Alarm | None:
        move = now - self.last if self.steps else 0.0
        self.last = now
        if move < 0.0:
            # A policy that backs off by 2^-4 falls as often as one that halves.
            self.unit = max(1.0, -move)
            if self.excused:
                self.usual += move
        fall = (self.usual - now) / self.unit
        alarm = None
        if self.steps < WARM or fall < 1.0:
            self.asked = 0.0
            self.since = record.step + 1
        elif record.finite:
            # Only a finite step shows how deep the fall is so far.
            if fall >= max(self.asked, FALL, DEEPER * self.normal_swing):
                self.asked = 2.0 * fall
                alarm = Alarm("scale", record.step, self.since, self.usual, now)
            elif not self.asked:
                self.swing = max(self.swing, fall)
        self.steps += 1
        if self.steps % MEMORY == 0:
            self.normal_swing = max(self.swing, FADE * self.normal_swing)
            self.swing = 0.0
        self.usual += (now - self.usual) / min(self.steps, MEMORY)
        return alarm

    def _watch_headroom(self, record: StepRecord, scale: float) -> Alarm | None:
        size = math.log2(record.amax) - scale
        self.read += 1
        self.gradient += (size - self.gradient) / min(self.read, RECENT)
        usual = self.usual_gradient
        rise = self.gradient - usual if self.read >= WARM else 0.0
        self.usual_gradient += (size - usual) / min(self.read, MEMORY)
        if rise < RISE / 2.0:
            self.grown = False
            self.gradient_since = record.step + 1
        due = rise >= RISE and self.headroom() <= NEAR
        # A falling scale that follows from the same growth was already reported.
        if not due or self.grown or self.asked:
            return None
        self.grown = True
        since = self.gradient_since
        return Alarm("headroom", record.step, since, usual, self.gradient)

    def headroom(self) -> float:
        """Return the bits between the mean of recent largest gradients and 65504."""
        return TOP - (self.gradient + self.last)
