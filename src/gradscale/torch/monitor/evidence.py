"""What is looked into before a step is judged: culprits, weights, a sample."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gradscale.core.records import StepRecord
from gradscale.torch.device_state.host_copy import LateRow
from gradscale.torch.device_state.layout import record_of
from gradscale.torch.locate.result import order_of_backward
from gradscale.torch.monitor.model_lookup import Roots
from gradscale.torch.monitor.notices import Notice
from gradscale.torch.monitor.weights import WeightsLook, weights_of
from gradscale.torch.step.optimizer_step import OpenStep
from gradscale.torch.underflow.sample import UnderflowSample

_LARGEST_F32 = torch.finfo(torch.float32).max


class Case(NamedTuple):
    """A step that waits to be judged.

    Attributes:
        record: Its facts, as far as they are known.
        steps: What each optimizer had done; empty if nobody saw it.
        sample: What the meter counted; None if it did not.
        notice: Who was not finite; None if all were.
        weights: A look at the weights; None if nobody looked.
    """

    record: StepRecord
    steps: Sequence[OpenStep]
    sample: UnderflowSample | None = None
    notice: Notice | None = None
    weights: WeightsLook | None = None

    @property
    def on_its_way(self) -> bool:
        """Whether something is not on the host yet; the same on every rank."""
        notice, weights = self.notice, self.weights
        return (notice is not None and notice.on_its_way) or (
            weights is not None and weights.on_its_way
        )


class Found(NamedTuple):
    """What a case came to.

    Attributes:
        record: The facts of the step.
        culprits: The names of the gradients or weights that were not finite.
        peaks: The largest scaled magnitude of each gradient, if somebody wants them.
        tensors: How many gradients were looked at.
    """

    record: StepRecord
    culprits: list[str]
    peaks: Mapping[str, float]
    tensors: int


class Inquiry:
    """Looks into steps in which something was not finite. Costs nothing in others.

    Args:
        model: Names parameters; None to look for it when something goes wrong.
        peaks: Somebody wants the peaks of bad steps.
    """

    def __init__(self, model: torch.nn.Module | None, *, peaks: bool) -> None:
        self._model = model
        self._peaks = peaks
        self._roots = Roots()

    def model_behind(self, steps: Sequence[OpenStep]) -> torch.nn.Module | None:
        """Return the model, looked for once if nobody gave it."""
        params = [p for s in steps if s.optimizer is not None for p in s.params()]
        if self._model is not None or not params:
            return self._model
        root = self._roots.of(hash(tuple(map(id, params))), [{"params": params}])
        return None if root is None else root()

    def begin(
        self,
        late: LateRow,
        steps: Sequence[OpenStep],
        sample: UnderflowSample | None,
        *,
        suspect: bool,
    ) -> Case:
        """Start all looks that a step asks for. No host sync.

        Args:
            late: The step.
            steps: What each optimizer had done.
            sample: What the meter counted.
            suspect: The steps before it were bad too, for no known reason.
        """
        record = record_of(late.row, late.step, late.loss)
        if record.loss is not None and math.isfinite(record.loss):
            fits = abs(record.loss * record.scale) <= _LARGEST_F32
            record = record._replace(scaled_loss_finite=fits)
        if sample is not None:
            record = record._replace(lost=sample.lost)
        well = record.finite and record.norm_finite and record.loss_finite
        if well or not record.read:
            return Case(record, steps, sample)
        record = record._replace(nan=math.isnan(record.amax))
        weights = None
        if suspect or not record.loss_finite:
            weights = self._look_at_weights(steps)
        return Case(record, steps, sample, Notice(steps), weights)

    def _look_at_weights(self, steps: Sequence[OpenStep]) -> WeightsLook | None:
        # Of sharded weights each rank has its own, and all must judge the same.
        if not steps or any(step.voice is not None for step in steps):
            return None
        optimizers = [s.optimizer for s in steps if s.optimizer is not None]
        model = self.model_behind(steps)
        try:
            return WeightsLook(weights_of(model, optimizers))
        except Exception:
            # Models run code of their own where they are asked for their parameters,
            # and weights may be of any kind: a look must not end the run.
            return None

    def end(self, case: Case, order: list[str], *, suspect: bool) -> Found:
        """Return what the looks have shown. Waits for them.

        Args:
            case: From `begin`.
            order: Parameters in the order of backward, if it was seen.
            suspect: As in `begin`; then it is worth a search for the model.
        """
        record, steps, sample, notice, weights = case
        if notice is None:
            return Found(record, [], {} if sample is None else sample.peaks, 0)
        model = self.model_behind(steps) if suspect else self._model
        culprits, _ = order_of_backward(notice.names(model), order or None)
        lost = [] if weights is None else weights.not_finite()
        if lost:
            record, culprits = record._replace(weights_finite=False), lost
        peaks = notice.peaks(model) if self._peaks else {}
        return Found(record, culprits, peaks, notice.tensors)
