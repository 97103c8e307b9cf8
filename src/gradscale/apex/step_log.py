"""Numbers, judges and records the steps of one scale."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradscale.core.outcome import StepOutcome
from gradscale.core.records import StepRecord
from gradscale.recording.recorded_run import RecordedRun
from gradscale.recording.recorder import Recorder
from gradscale.torch.monitor.recorder import process_here


class StepLog:
    """The outcomes of the checks of one scale.

    Args:
        recorder: Writes the run file; None to write none.
        policy, names: As in `Recorder.bind`.
        settings: Further arguments of `RecordedRun`.

    Attributes:
        recording: Judges and records the steps.
        last: The outcome of the last one; None before the first.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        *,
        policy: Any = None,
        names: Callable[[], Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        if recorder is not None:
            recorder.bind(policy=policy, names=names, process=process_here)
        self.recording = RecordedRun(
            recorder=recorder,
            process=process_here,
            versions={"apex": "gradscale", "torch": torch.__version__},
            **settings,
        )
        self.last: StepOutcome | None = None
        self._steps = self._floor_steps = 0
        self._calibrated = self._grown = False

    def add(
        self,
        scales: tuple[float, float],
        *,
        finite: bool,
        applied: bool,
        floor: float | None,
        state: Callable[[], dict[str, Any]],
        read: bool = True,
        amax: float = 0.0,
        loss: float | None = None,
        culprits: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Add one step.

        Args:
            scales: The scale of this step and that of the next one.
            finite: Every gradient was finite.
            applied: The step is taken.
            floor: The lowest scale; None if the scale does not move.
            state: Returns the state of the scale, for a bundle.
            read: At least one gradient was read.
            amax: The largest magnitude among the scaled gradients; 0 if not known.
            loss: The loss before it was scaled; None if it is not one number.
            culprits: Returns the names of gradients that were not finite.

        Raises:
            HopelessRun: No scale can help, and `guard` is "raise".
        """
        used, following = scales
        self._steps += 1
        at_floor = floor is not None and used <= floor and not finite
        self._floor_steps = self._floor_steps + 1 if at_floor else 0
        record = StepRecord(
            step=self._steps,
            scale=used,
            applied=applied,
            finite=finite,
            loss_finite=loss is None or math.isfinite(loss),
            read=read,
            calibrated=self._calibrated,
            grown=self._grown,
            floor_steps=self._floor_steps,
            amax=amax,
            scaled_loss_finite=loss is None or _is_f32(loss * used),
            nan=math.isnan(amax),
            loss=loss,
        )
        self._calibrated |= finite
        self._grown = following > used
        names = () if finite else tuple(culprits())
        self.last = StepOutcome(lambda: record, lambda: names)
        if self.recording.recorder is not None:
            # Rows of several losses may share a file.
            self.recording.recorder.begin_update()
        self.recording.record_step(record, names, state=state)
        if self.recording.hopeless is not None:
            raise self.recording.hopeless


def _is_f32(value: float) -> bool:
    return abs(value) < 2.0**128
