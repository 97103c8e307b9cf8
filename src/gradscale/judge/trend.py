"""The early warning: the scale or the headroom is on its way down."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gradscale.core.records import StepRecord

# log2 of 65504, the largest float16.
TOP = math.log2(65504.0)
# The usual value is a mean over this many steps: longer than a few saw-teeth of
# growth_interval=2000, shorter than the phases of a long run.
MEMORY = 5000
# Mean over as many steps for the present value of a gradient, which differs from
# batch to batch.
RECENT = 20
# Steps before there is a usual value to fall from.
WARM = 200
# Backoffs below the usual scale that are too many, and how much deeper than the
# swings so far. Healthy runs with recorded noise swing by up to three.
FALL = 3.5
DEEPER = 2.0
# What is left of a swing after another MEMORY steps: the deepest come rarely.
FADE = 0.9
# Bits by which gradients grow, and bits of headroom that are then left.
RISE = 4.0
NEAR = 3.0


def exponent(scale: float) -> float:
    """Return log2 of a scale, also of one that another scaler has ruined.

    >>> exponent(1024.0), exponent(0.0)
    (10.0, -150.0)
    """
    # In this order a NaN becomes the lower bound. Both bounds are beyond any f32.
    return math.log2(min(max(2.0**-150, scale), 2.0**128))


class Alarm(NamedTuple):
    """One early warning.

    Attributes:
        signal: "scale", which has fallen, or "headroom", which is nearly used up.
        step: The step at which it was seen.
        since: The step after the last one at which all was as usual.
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
        """How far the value is from its usual one."""
        return abs(self.now - self.usual)


@dataclass(slots=True)
class Slope:
    """Watch log2 of the scale and the headroom of the gradients for a fall.

    The scale alarm compares the scale with its mean over the last 5000 steps. The
    saw-tooth of growth and backoff stays within a few backoffs of that mean, and how
    many they are is learned; a run that is about to diverge goes deeper. The headroom
    alarm compares the largest unscaled gradient, which knows no saw-tooth, with its
    own mean, and speaks when it has grown and float16 is nearly full. Each is said
    once, and again when the fall is twice as deep or after a return to the usual.

    The state is a dozen scalars, however long the run.

    >>> slope = Slope()
    >>> calm = StepRecord(step=1, scale=65536.0, applied=True, finite=True)
    >>> for step in range(1, 1001):
    ...     assert slope.see(calm._replace(step=step)) is None
    >>> for halvings in range(1, 5):
    ...     fallen = calm._replace(step=1000 + halvings, scale=2.0 ** (16 - halvings))
    ...     alarm = slope.see(fallen)
    >>> alarm.signal, alarm.since, round(alarm.bits, 2)
    ('scale', 1001, 3.99)
    """

    steps: int = 0
    usual: float = 0.0
    last: float = 0.0
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

    def see(self, record: StepRecord, *, blamed: bool = False) -> Alarm | None:
        """Take one step in; return an alarm if it is due.

        Args:
            record: The step's facts.
            blamed: The step was skipped for a cause that is known and is not the
                scale. The backoff that follows it is then no sign of a fall.
        """
        now = exponent(record.scale)
        alarm = self._watch_scale(record, now)
        self.excused = blamed
        if record.finite and 0.0 < record.amax < math.inf:
            alarm = self._watch_headroom(record, now) or alarm
        return alarm

    def growth(self) -> float:
        """Return the bits by which gradients are above their usual size just now."""
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
            # Only a finite step shows where a fall has ended, so far.
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
        usual, rise = self.usual_gradient, self.growth()
        self.usual_gradient += (size - usual) / min(self.read, MEMORY)
        if rise < RISE / 2.0:
            self.grown = False
            self.gradient_since = record.step + 1
        due = rise >= RISE and self.headroom() <= NEAR
        # A scale that has given way to the same growth has been spoken of.
        if not due or self.grown or self.asked:
            return None
        self.grown = True
        since = self.gradient_since
        return Alarm("headroom", record.step, since, usual, self.gradient)

    def headroom(self) -> float:
        """Return the bits between the largest gradient of late and 65504."""
        return TOP - (self.gradient + self.last)
