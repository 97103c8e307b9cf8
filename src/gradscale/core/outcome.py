"""The outcome of a step, read on first access."""

from collections.abc import Callable, Mapping
from typing import Any

from gradscale.core.records import StepRecord, Verdict, classify


class StepOutcome:
    """The outcome of one step.

    Creating one never syncs; reading a field may wait for the device, once for all
    fields together.

    >>> record = StepRecord(step=7, scale=1024.0, applied=True, finite=True)
    >>> outcome = StepOutcome(lambda: record, lambda: ())
    >>> outcome.applied, outcome.scale, str(outcome.verdict)
    (True, 1024.0, 'ok')

    Args:
        read_record: Returns the step's record; called on first access.
        read_culprits: Returns the names of the tensors that were not finite.
        parts: For each optimizer's id, its own outcome.
    """

    def __init__(
        self,
        read_record: Callable[[], StepRecord],
        read_culprits: Callable[[], tuple[str, ...]],
        parts: Mapping[int, "StepOutcome"] | None = None,
    ) -> None:
        self._read_record = read_record
        self._read_culprits = read_culprits
        self._parts = parts or {}
        self._record: StepRecord | None = None

    @property
    def record(self) -> StepRecord:
        """The record of the step, a plain tuple."""
        if self._record is None:
            self._record = self._read_record()
        return self._record

    @property
    def step(self) -> int:
        """The number of the `update()`, counted from 1."""
        return self.record.step

    @property
    def scale(self) -> float:
        """The scale that multiplied the loss."""
        return self.record.scale

    @property
    def applied(self) -> bool:
        """True if a step was applied and all gradients were finite."""
        return self.record.applied

    @property
    def grad_norm(self) -> float | None:
        """The norm of the unscaled gradients; None if it was not computed."""
        return self.record.grad_norm

    @property
    def amax(self) -> float:
        """The largest magnitude among the scaled gradients."""
        return self.record.amax

    @property
    def verdict(self) -> Verdict:
        """The verdict on the step alone."""
        return classify(self.record)

    @property
    def culprits(self) -> tuple[str, ...]:
        """The names of the tensors that were not finite, in the optimizer's order."""
        return self._read_culprits()

    def __getitem__(self, optimizer: Any) -> "StepOutcome":
        """Return the outcome of one optimizer."""
        try:
            return self._parts[id(optimizer)]
        except KeyError:
            raise KeyError(
                f"{type(optimizer).__name__} took no part in step {self.step}. Only "
                "optimizers whose unscale_() or step() ran before the last update() "
                "have an outcome. Call step(optimizer) first."
            ) from None

    def __repr__(self) -> str:
        step = self.record
        fields = f"step={step.step}, scale={step.scale:g}, applied={step.applied}"
        return f"StepOutcome({fields}, verdict={self.verdict})"
