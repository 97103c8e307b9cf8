"""The scale of one loss, moved by the rule of gradscale's policies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.apex.step_log import StepLog
from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import DynamicScale, StaticScale
from gradscale.core.state import PYTHON, Observed, ScaleState
from gradscale.recording.recorded_run import RecordedRun


def _setting(name: str) -> property:
    def read(scaler: "LossScaler") -> Any:
        return getattr(scaler.policy, name, None)

    def change(scaler: "LossScaler", value: float | None) -> None:
        if value is None and name == "min_scale":
            # Apex's default, as `amp.initialize` reads it.
            value = 0.0 if scaler.exact else DynamicScale.min_scale
        # A fixed scale has no such setting.
        if scaler.dynamic:
            settings = {**vars(scaler.policy), name: value}
            scaler.policy = DynamicScale.unchecked(**settings)

    return property(read, change)


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
        log: Judges and records the passes.
        own_checks: How often the script has called `update_scale` itself.
    """

    # Apex's names, for scripts that change them.
    _scale_seq_len = _setting("growth_interval")
    _min_loss_scale = _setting("min_scale")
    _max_loss_scale = _setting("max_scale")
    # int[1], not 0 after an overflow; set by scripts that check gradients themselves.
    _overflow_buf: Tensor | None = None

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
        self.own_checks = 0
        self.log = StepLog(quiet=True)

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last pass."""
        return self.log.last

    @property
    def recording(self) -> RecordedRun:
        """Judges and records the passes."""
        return self.log.recording

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget an overflow."""
        self._has_overflow = False
        if self._overflow_buf is not None:
            self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Move the scale for a script that has checked the gradients. Syncs.

        Passes whose check was delayed until now are not checked again.

        Returns:
            Whether to skip the step: `_has_overflow` or `_overflow_buf` is set.
        """
        if self._overflow_buf is not None:
            self._has_overflow |= bool(self._overflow_buf.item())
        self.own_checks += 1
        return self.record_pass()

    def _move(self, *, finite: bool) -> bool:
        """Move the scale; return whether to skip the step."""
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

    def record_pass(self, **facts: Any) -> bool:
        """Move the scale, record the pass; return whether to skip the step.

        The pass was finite unless `_has_overflow` is set.

        Args:
            facts: Arguments of `StepLog.add` about the gradients and the loss.
        """
        used, finite = self._loss_scale, not self._has_overflow
        skip = self._move(finite=finite)
        self.log.add(
            (used, self._loss_scale),
            finite=finite,
            applied=not skip,
            floor=self.policy.min_scale if self.dynamic else None,
            state=self.state_dict,
            **facts,
        )
        return skip

    def state_dict(self) -> dict[str, Any]:
        """Return the two entries of apex's checkpoint."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}


def to_host(values: Sequence[Tensor], device: torch.device) -> list[float]:
    """Return f32[] tensors of any device as numbers; the only sync of a pass."""
    return torch.stack([value.detach().to(device).float() for value in values]).tolist()
