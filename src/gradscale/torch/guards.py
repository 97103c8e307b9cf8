"""What the scaler says and refuses."""

import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.ops import f32
from gradscale.core.outcome import StepOutcome
from gradscale.core.verdicts import COLLAPSED_AFTER, StepRecord
from gradscale.errors import (
    ConfigError,
    GradientError,
    GradscaleWarning,
    OrderError,
    ScaleCollapsed,
)
from gradscale.torch.gradients import Gradients
from gradscale.torch.ledger import record_of

_BAD_TENSOR = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
    "torch.FloatTensor with requires_grad=False."
)


class Watchman:
    """Acts on facts that have reached the host; says each thing once."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def act(
        self,
        late_row: Sequence[float],
        policy: AnyPolicy,
        last: Callable[[], StepOutcome | None],
    ) -> None:
        """Raise or warn as the facts of two steps ago demand."""
        record = record_of(late_row, step=0)
        if record.floor_steps >= COLLAPSED_AFTER:
            raise _collapsed(record, policy, last())
        fixed = policy.min_scale == policy.max_scale
        if fixed and record.read and not record.applied:
            self._warn_once(
                "static",
                f"A step was skipped: the gradients were not finite at the fixed scale "
                f"{record.scale:g}. A fixed scale cannot back off, so this may go on. "
                "Pass a lower scale, or use DynamicScale. Further skips are counted in "
                "scaler.skipped_steps.",
                "GS205",
            )
        if late_row[-1]:
            self._warn_once(
                "refused",
                "A scale given to update() as a tensor was outside "
                f"[{policy.min_scale:g}, {policy.max_scale:g}] and was ignored. It "
                "would have broken the bounds of the policy. Pass a scale inside them.",
                "GS109",
            )

    def warn_no_gradients(self, optimizer: Any) -> None:
        """Say once for each optimizer that a step had nothing to do."""
        kind = type(optimizer).__name__
        self._warn_once(
            ("idle", id(optimizer)),
            f"No parameter of {kind} has a gradient: its step was left out. If this "
            "happens in every iteration, the parameters are frozen, unused, or belong "
            "to another model, and nothing is learned. Check requires_grad and that "
            "the loss depends on them. Said once for each optimizer.",
            "GS103",
        )

    def _warn_once(self, key: object, message: str, code: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(GradscaleWarning(message, code=code), stacklevel=4)


def _collapsed(
    record: StepRecord, policy: AnyPolicy, last: StepOutcome | None
) -> ScaleCollapsed:
    culprits = last.culprits if last is not None else ()
    listed = f" Not finite: {', '.join(culprits[:5])}." if culprits else ""
    loss = "finite" if record.loss_finite else "itself not finite"
    return ScaleCollapsed(
        f"The scale has fallen to its floor of {policy.min_scale:g} and the gradients "
        f"were still not finite, {record.floor_steps} steps in a row; the loss was "
        f"{loss}.{listed} A lower scale cannot help, so the cause is not the scale: "
        "a loss, an input or a weight that is not finite. Every bad step was skipped "
        "and the weights are as the last good step left them. Look at scaler.last, "
        "check the batch and the loss, and go on from here or from a checkpoint.",
        code="GS202",
    )


def checked_scale(
    new_scale: Any, policy: AnyPolicy, device: str, like: Tensor
) -> Tensor | None:
    """Return `new_scale` as f32[] on `like`'s device, or refuse it."""
    if new_scale is None:
        return None
    if isinstance(new_scale, Tensor):
        wrong = new_scale.device.type != device or new_scale.numel() != 1
        if wrong or new_scale.requires_grad:
            raise ConfigError(
                f"new_scale is a tensor on {new_scale.device} with "
                f"{new_scale.numel()} elements, requires_grad="
                f"{new_scale.requires_grad}. Pass a number, or one element on a "
                f"{device} device without a gradient.",
                code="GS101",
                replaces=_BAD_TENSOR,
            )
        if new_scale.device.type != "cpu":
            return new_scale.reshape(()).to(like.device, torch.float32)
        new_scale = new_scale.item()
    number = math.nan
    if isinstance(new_scale, Real) and not isinstance(new_scale, bool):
        number = f32(float(new_scale))
    if not policy.min_scale <= number <= policy.max_scale:
        raise ConfigError(
            f"update({new_scale!r}) asks for a scale outside "
            f"[{policy.min_scale:g}, {policy.max_scale:g}]. It would break the bounds "
            "of the policy. Pass a scale inside them, or widen them with "
            "policy=DynamicScale(min_scale=..., max_scale=...).",
            code="GS101",
        )
    return torch.full_like(like, number)


def refuse_sharded_norm(gradients: Gradients | None, where: str) -> None:
    """Refuse the norm of DTensor gradients: a shard's norm is not the whole's."""
    if gradients is not None and gradients.sharded:
        raise GradientError(
            f"{where} has DTensor gradients, of which this rank holds a part. The norm "
            "of the part would clip too little. Call unscale_() and then "
            "torch.nn.utils.clip_grad_norm_(), which reduces over the mesh.",
            code="GS106",
        )


def tell_scheduler(optimizer: Any) -> None:
    """Keep LR schedulers from warning that the first step was never called."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True


def report_late_backward(names: Sequence[str], as_error: bool) -> None:
    """Say that scaled gradients were added to unscaled ones."""
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    message = (
        f"backward() added scaled gradients to unscaled ones in {listed}. Their sum is "
        "neither, and the step will be wrong. Call unscale_() or clip_grad_norm_() "
        "after the last backward of the iteration, or update() before the next."
    )
    if as_error:
        raise OrderError(message, code="GS104")
    warnings.warn(GradscaleWarning(message, code="GS104"), stacklevel=2)
