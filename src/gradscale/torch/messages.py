"""What the scaler says and refuses."""

import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.outcome import StepOutcome
from gradscale.core.records import COLLAPSED_AFTER, StepRecord
from gradscale.core.state import f32
from gradscale.errors import (
    ConfigError,
    GradscaleWarning,
    OrderError,
    ScaleCollapsed,
)
from gradscale.torch.device_state.layout import ROW, record_of
from gradscale.torch.resuming import has_steps

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
                stacklevel=6,
            )
        if late_row[ROW.index("refused")]:
            self._warn_once(
                "refused",
                "A scale given to update() as a tensor was outside "
                f"[{policy.min_scale:g}, {policy.max_scale:g}] and was ignored. It "
                "would have broken the bounds of the policy. Pass a scale inside them.",
                "GS109",
                stacklevel=6,
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
            stacklevel=6,
        )

    def warn_without_state(self, optimizer: Any, scale: float) -> None:
        """Say once that an optimizer resumes and the scaler starts anew.

        Args:
            optimizer: Looked at before its first step under this scaler.
            scale: What the scaler starts with.
        """
        key = ("first", id(optimizer))
        if key in self._said:
            return
        self._said.add(key)
        if has_steps(optimizer):
            self._warn_once(
                "resumed",
                f"{type(optimizer).__name__} has steps behind it, and the scaler "
                f"starts at scale={scale:g} with no state loaded. If the run resumes, "
                "it looks for the scale again: steps are skipped that were not to be, "
                "and it goes on differently from a run that was not stopped. Save "
                "scaler.state_dict() beside the optimizer's, and call "
                "scaler.load_state_dict(). If the steps before were not scaled, all is "
                "well. Said once.",
                "GS301",
                stacklevel=4,
            )

    def _warn_once(
        self, key: object, message: str, code: str, *, stacklevel: int
    ) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(GradscaleWarning(message, code=code), stacklevel=stacklevel)


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
        try:
            number = f32(float(new_scale))
        except OverflowError:
            number = math.inf
    if not policy.min_scale <= number <= policy.max_scale:
        raise ConfigError(
            f"update({new_scale!r}) asks for a scale outside "
            f"[{policy.min_scale:g}, {policy.max_scale:g}]. It would break the bounds "
            "of the policy. Pass a scale inside them, or widen them with "
            "policy=DynamicScale(min_scale=..., max_scale=...).",
            code="GS101",
        )
    return torch.full_like(like, number)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse an option that nothing answers to."""
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is not one of {', '.join(map(repr, choices))}. "
            "Nothing would answer to it. Pass one of these, or leave it out.",
            code="GS101",
        )


def not_scaled(funcname: str, missing: str) -> OrderError:
    """Say that nothing was scaled yet."""
    return _order(
        f"{funcname} came before the first scale(). The gradients cannot have been "
        "scaled. Call scaler.scale(loss).backward() first.",
        f"Attempted {funcname} but {missing} is None.  This may indicate your script "
        "did not use scaler.scale(loss or outputs) earlier in the iteration.",
    )


def unscaled_before(stepped: bool) -> OrderError:
    """Say that the gradients are unscaled already."""
    if stepped:
        return _order(
            "unscale_() was called after step(), which has already unscaled the "
            "gradients. They would be divided by the scale a second time. Call "
            "unscale_() before step().",
            "unscale_() is being called after step().",
        )
    return _order(
        "unscale_() was called twice for one optimizer in one step. The gradients "
        "would be divided by the scale a second time. Call update() between steps, or "
        "remove the second unscale_().",
        "unscale_() has already been called on this optimizer since the last update().",
    )


def stepped_before() -> OrderError:
    """Say that the optimizer has stepped already."""
    return _order(
        "step() was called twice for one optimizer. The second one would apply the "
        "same gradients again. Call update() after each step.",
        "step() has already been called since the last update().",
    )


def clipped_late(optimizer: Any) -> OrderError:
    """Say that the gradients to be clipped are already used."""
    return OrderError(
        f"clip_grad_norm_() was called after step() of {type(optimizer).__name__}. "
        "Its gradients are already used. Call clip_grad_norm_() before step().",
        code="GS102",
    )


def nothing_to_update() -> OrderError:
    """Say that no optimizer has stepped."""
    return _order(
        "update() was called although no optimizer stepped since the last one. There "
        "is nothing to move the scale by. Call step(optimizer) first, or reset() to "
        "abandon the iteration.",
        "No inf checks were recorded prior to update.",
    )


def pickled_inside() -> OrderError:
    """Say that an iteration is under way."""
    return _order(
        "The scaler was pickled or copied in the middle of an iteration. What the "
        "optimizers have done so far would be lost. Do it after update().",
        "A GradScaler instance may only be pickled at the beginning of an iteration, "
        "or at the end after scaler.update().",
    )


def pickled_with_group() -> ConfigError:
    """Say that a process group cannot travel."""
    return ConfigError(
        "A scaler with a process_group was pickled or copied. A process group lives in "
        "this process only, and without it the copy would decide alone. Save "
        "state_dict() and load it into a new scaler.",
        code="GS101",
    )


def no_model() -> ConfigError:
    """Say that there is nothing to replay."""
    return ConfigError(
        "diagnose() was called on a scaler that knows no model, and none that holds "
        "the parameters of its last step was found. There are no modules to name. Pass "
        "model= to the scaler.",
        code="GS101",
    )


def closure_given() -> OrderError:
    """Say that a closure cannot be run."""
    return OrderError(
        "step() was given a closure. It would make gradients that are scaled and "
        "unchecked, and apply them. Run the closure yourself before step(), and leave "
        "it out here.",
        code="GS108",
        replaces="Closure use is not currently supported if GradScaler is enabled.",
    )


def _order(message: str, torch_says: str) -> OrderError:
    return OrderError(message, code="GS102", replaces=torch_says)


def tell_scheduler(optimizer: Any) -> None:
    """Keep LR schedulers from warning that the first step was never called."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True


def report_late_backward(names: Sequence[str], as_error: bool) -> None:
    """Say that scaled gradients were added to unscaled ones."""
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    message = (
        "backward() added to gradients that were already unscaled or clipped: "
        f"{listed}. Their sum is neither, and the step will be wrong. Call unscale_() "
        "and clip_grad_norm_() after the last backward of the iteration."
    )
    if as_error:
        raise OrderError(message, code="GS104")
    warnings.warn(GradscaleWarning(message, code="GS104"), stacklevel=2)
