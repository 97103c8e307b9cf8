"""The outcome of the last step, as two variables of the optimizer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from gradscale.core.outcome import StepOutcome
from gradscale.core.records import StepRecord

# The facts of a step that come before the peaks.
HEAD = ("scale", "applied", "finite", "calibrated", "grown", "amax")


class Counts(NamedTuple):
    """Counts of steps.

    Attributes:
        applied: Steps taken.
        skipped: Steps skipped because a value was not finite.
        at_floor: Steps in a row that were not finite at the lowest scale.
        debt: Finite steps still owed for the last forgiven overflow; see
            `DynamicScale`.
    """

    applied: Any
    skipped: Any
    at_floor: Any
    debt: Any


class LastStep:
    """The variables that hold the outcome of the last step.

    They are among the optimizer's `variables`, so that they survive a step compiled by
    JAX, and not among those that are saved: the optimizer must not track them.

    Args:
        size: The number of gradients.
        scale: The scale before the first step.

    Attributes:
        counts: int[4], the fields of `Counts`.
        facts: f32[6 + n], the facts of `HEAD` and then the peaks.
    """

    def __init__(self, size: int, scale: float) -> None:
        self.counts = _variable([0] * len(Counts._fields), "int", "step_counts")
        facts = [scale] + [0.0] * (len(HEAD) - 1 + size)
        self.facts = _variable(facts, "float32", "last_step")

    @property
    def variables(self) -> list[Any]:
        """Both variables."""
        return [self.counts, self.facts]

    def counted(self) -> Counts:
        """Return the counts as tensors."""
        counts = ops.convert_to_tensor(self.counts)
        return Counts(*(counts[place] for place in range(len(Counts._fields))))

    def values(self) -> tuple[Any, Any]:
        """Return int[4] and f32[6 + n] as they are now, in tensors of their own."""
        return ops.copy(self.counts.value), ops.copy(self.facts.value)


def packed(peaks: Any, **facts: Any) -> Any:
    """Return f32[6 + n]: the facts of `HEAD` and the peaks as one tensor."""
    head = [ops.cast(facts[name], "float32") for name in HEAD]
    return ops.concatenate([ops.stack(head), peaks])


def outcome(counts: Any, facts: Any, names: Sequence[str]) -> StepOutcome:
    """Return the outcome of a step; its fields wait for the device.

    Args:
        counts: int[4], the fields of `Counts`.
        facts: f32[6 + n], as `packed` returns them.
        names: The names of the n variables.
    """

    def culprits() -> tuple[str, ...]:
        return culprits_of(peaks_of(facts, names))

    return StepOutcome(lambda: record_of(counts, facts), culprits)


def record_of(counts: Any, facts: Any) -> StepRecord:
    """Return the record of a step on the host."""
    counted = Counts(*keras.ops.convert_to_numpy(counts).tolist())
    values = keras.ops.convert_to_numpy(facts)[: len(HEAD)].tolist()
    head = dict(zip(HEAD, values, strict=True))
    return StepRecord(
        step=counted.applied + counted.skipped,
        scale=head["scale"],
        applied=head["applied"] > 0.0,
        finite=head["finite"] > 0.0,
        calibrated=head["calibrated"] > 0.0,
        grown=head["grown"] > 0.0,
        floor_steps=counted.at_floor,
        amax=head["amax"],
        nan=math.isnan(head["amax"]),
    )


def peaks_of(facts: Any, names: Sequence[str]) -> dict[str, float]:
    """Return the largest magnitude of each gradient by name."""
    peaks = keras.ops.convert_to_numpy(facts)[len(HEAD) :].tolist()
    return dict(zip(names, peaks, strict=True))


def culprits_of(peaks: dict[str, float]) -> tuple[str, ...]:
    """Return the names of the gradients that were not finite."""
    return tuple(name for name, peak in peaks.items() if not math.isfinite(peak))


def _variable(values: Sequence[float], dtype: str, name: str) -> Any:
    return keras.Variable(
        values, dtype=dtype, trainable=False, aggregation="none", name=name
    )
