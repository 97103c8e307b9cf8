"""The scale of one loss, moved by the rule of gradscale's policies."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import DynamicScale, StaticScale
from gradscale.core.records import StepRecord
from gradscale.core.state import PYTHON, Observed, ScaleState
from gradscale.recording.recorded_run import RecordedRun


class LossScaler:
    """The scale of one loss, and the outcomes of its backward passes.

    `_loss_scale` and `_unskipped`, which third-party code accesses, are the state;
    `policy` has the settings and the rule.

    >>> scaler = LossScaler("dynamic", scale_window=2)
    >>> for overflow in (False, False, True):
    ...     scaler._has_overflow = overflow
    ...     print(scaler.update_scale(), scaler.loss_scale())
    False 65536.0
    False 131072.0
    True 65536.0

    Args:
        loss_scale: "dynamic", or a fixed scale.
        init_scale: The first scale; clipped to `max_loss_scale`.
        scale_factor: Has no effect, as in apex: the scale is doubled and halved.
        scale_window: The finite passes in a row after which the scale doubles.
        min_loss_scale: The floor; None for 2^-24, and for none if `exact`.
        max_loss_scale: The ceiling.
        exact: As apex: no floor, no skip at a fixed scale, no validation.

    Attributes:
        dynamic: The scale moves.
        policy: Settings and rule.
        last: The outcome of the last pass.
        recording: Judges and records the passes.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        *,
        exact: bool = False,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.exact = exact
        self.policy: DynamicScale | StaticScale
        if not self.dynamic:
            self.policy = StaticScale(scale=float(loss_scale))
            first = self.policy.scale
        else:
            settings: dict[str, Any] = {
                "init_scale": min(init_scale, max_loss_scale),
                "growth_interval": scale_window,
                "max_scale": max_loss_scale,
            }
            if min_loss_scale is not None:
                settings["min_scale"] = min_loss_scale
            elif exact:
                settings["min_scale"] = 0.0
            make = DynamicScale.unchecked if exact else DynamicScale
            self.policy = make(**settings)
            first = self.policy.init_scale
        self._loss_scale: float = first
        self._unskipped = 0
        self._has_overflow = False
        self._steps = self._floor_steps = 0
        self._calibrated = self._grown = False
        self.last: StepOutcome | None = None
        self.recording = RecordedRun(quiet=True)

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget an overflow."""
        self._has_overflow = False

    def update_scale(self) -> bool:
        """Move the scale by `_has_overflow`; return whether to skip the step."""
        finite = not self._has_overflow
        if isinstance(self.policy, DynamicScale):
            state = ScaleState(self._loss_scale, self._unskipped)
            seen = Observed(finite, 0.0, True)
            moved = self.policy.next_state(state, seen, PYTHON.where)
            self._loss_scale = float(moved.scale)
            self._unskipped = int(moved.finite_steps)
            return not finite
        skip = not finite and not self.exact
        self._unskipped += not skip
        return skip

    def see(
        self,
        *,
        read: bool,
        amax: float,
        loss: float | None,
        culprits: Callable[[], Sequence[str]],
    ) -> bool:
        """Move the scale, record the pass; return whether to skip the step.

        Args:
            read: At least one gradient was read.
            amax: The largest magnitude among the scaled gradients.
            loss: The loss before it was scaled; None if it is not one number.
            culprits: Returns the names of gradients that were not finite.
        """
        used, finite = self._loss_scale, not self._has_overflow
        skip = self.update_scale()
        self._steps += 1
        at_floor = self.dynamic and used <= self.policy.min_scale and not finite
        self._floor_steps = self._floor_steps + 1 if at_floor else 0
        record = StepRecord(
            step=self._steps,
            scale=used,
            applied=not skip,
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
        self._grown = self._loss_scale > used
        names = () if finite else tuple(culprits())
        self.last = StepOutcome(lambda: record, lambda: names)
        if self.recording.recorder is not None:
            # Rows of several losses may share a file.
            self.recording.recorder.begin_update()
        self.recording.record_step(record, names, state=self.state_dict)
        if self.recording.hopeless is not None:
            raise self.recording.hopeless
        return skip

    def state_dict(self) -> dict[str, Any]:
        """Return the two entries of apex's checkpoint."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}


def to_host(values: Sequence[Tensor], device: torch.device) -> list[float]:
    """Return f32[] tensors of any device as numbers; the only sync of a pass."""
    return torch.stack([value.detach().to(device).float() for value in values]).tolist()


def _is_f32(value: float) -> bool:
    return abs(value) < 2.0**128
