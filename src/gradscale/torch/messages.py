"""Errors and warnings of the scaler."""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.records import StepRecord
from gradscale.core.state import f32
from gradscale.errors import (
    ConfigError,
    GradscaleWarning,
    OrderError,
    ScaleCollapsed,
)

# Frames of these files are not the user's.
_LIBRARIES = (
    *(
        os.path.join(os.path.dirname(path), "")
        for path in (torch.__file__, sys.modules["gradscale"].__file__ or "")
    ),
    contextlib.__file__,
)
_BAD_TENSOR = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
    "torch.FloatTensor with requires_grad=False."
)

# Causes of gradients of two scales: a code, the observation, the remedy.
Mixture = Literal["closed", "older", "foreign"]
_MIXTURES: dict[Mixture, tuple[str, str, str]] = {
    "closed": (
        "GS104",
        "backward() added to gradients that were already unscaled or clipped",
        "Their sum is neither, and the step will be wrong. Call unscale_() and "
        "clip_grad_norm_() after the last backward of the iteration.",
    ),
    "older": (
        "GS104",
        "backward() added to gradients that were made before an update() moved the "
        "scale, and their optimizer is new to the scaler",
        "The sum of two scales is wrong, unless the first ones were zeroed in place in "
        "between. Call zero_grad() after update(), or pass the optimizer to unscale_() "
        "or step() before it.",
    ),
    "foreign": (
        "GS114",
        "Gradients of the first step come, at least in part, from a backward() that "
        "did not begin at a loss of this scaler",
        "step() divides them by its scale all the same, and such a part becomes too "
        "small or too large. Call scaler.scale(loss).backward() for every loss, by one "
        "scaler for losses that share parameters, and zero_grad() after a backward() "
        "whose gradients are not meant for the step.",
    ),
}


Write = Literal["clipped", "unscaled"]
_WRITES: dict[Write, tuple[str, str, str]] = {
    "clipped": (
        "The gradients of the first step were clipped before they were unscaled,",
        "Once unscaled they are smaller than the clip means by the factor of the "
        "scale. Call scaler.clip_grad_norm_(optimizer, max_norm), or "
        "scaler.unscale_(optimizer) before your clip.",
        "GS112",
    ),
    "unscaled": (
        "The gradients of the first step were divided by the scale before step(),",
        "step() divides them again, and the update is too small by the factor of the "
        "scale. Remove the division, or call scaler.unscale_(optimizer) instead.",
        "GS113",
    ),
}


class WarnOnce:
    """Warnings that are issued once for a scaler."""

    def __init__(self) -> None:
        self._issued: set[object] = set()

    def static_skip(self, scale: float) -> None:
        """Warn that a fixed scale skips steps."""
        self._warn(
            "static",
            f"A step was skipped: the gradients were not finite at the fixed scale "
            f"{scale:g}. A fixed scale cannot back off, so this may continue. Pass "
            "a lower scale, or use DynamicScale. Further skips are counted in "
            "scaler.skipped_steps.",
            "GS205",
        )

    def refused_scale(self, policy: AnyPolicy) -> None:
        """Warn that a scale given as a tensor was out of bounds."""
        self._warn(
            "refused",
            "A scale given to update() as a tensor was outside "
            f"[{policy.min_scale:g}, {policy.max_scale:g}] and was ignored. It "
            "would have violated the bounds of the policy. Pass a scale inside them.",
            "GS109",
        )

    def clipped_scale(self, scale: float, policy: AnyPolicy) -> None:
        """Warn that a scale that torch would take was out of bounds."""
        self._warn(
            "clipped",
            f"The scale was set to {scale:g}, which is outside "
            f"[{policy.min_scale:g}, {policy.max_scale:g}]. Torch would use it and "
            "could write NaN into the weights: the nearest bound was taken instead; "
            "for NaN, the scale of the step before. Check what computes the scale.",
            "GS109",
        )

    def no_gradients(self, optimizer: Any) -> None:
        """Warn that a step had no gradient."""
        kind = type(optimizer).__name__
        self._warn(
            ("idle", id(optimizer)),
            f"No parameter of {kind} has a gradient, so its step was skipped. If this "
            "happens in every iteration, the parameters are frozen, unused, or belong "
            "to another model, and nothing is learned. Check requires_grad and that "
            "the loss depends on them. Reported once for each optimizer.",
            "GS103",
        )

    def without_state(self, optimizer: Any, scale: float, *, moves: bool) -> bool:
        """Warn if an optimizer resumes but the scaler does not; return whether it did.

        Args:
            optimizer: The optimizer, before its first step with this scaler.
            scale: The initial scale.
            moves: The scale is not fixed.
        """
        key = ("first", id(optimizer))
        if key in self._issued or not moves:
            return False
        self._issued.add(key)
        resumes = has_steps(optimizer)
        if resumes:
            self._warn(
                "resumed",
                f"{type(optimizer).__name__} has taken steps before, and the scaler "
                f"starts at scale={scale:g} with no state loaded. If the run resumes, "
                "steps may be skipped while the scale recalibrates, so the run will "
                "not match an uninterrupted one. Save scaler.state_dict() beside the "
                "optimizer's, and call scaler.load_state_dict(). If the earlier steps "
                "were not scaled, ignore this. Reported once.",
                "GS301",
            )
        return resumes

    def float16_params(self, message: str) -> None:
        """Warn of float16 parameters without masters."""
        self._warn("float16", message, "GS120")

    def mixture(self, names: Sequence[str], why: Mixture, as_error: bool) -> None:
        """Warn, or raise, that gradients of two scales were added up.

        Args:
            names: The names of the parameters.
            why: The cause.
            as_error: Raise.
        """
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        code, seen, remedy = _MIXTURES[why]
        message = f"{seen}: {listed}. {remedy}"
        if as_error:
            raise OrderError(message, code=code)
        self._warn((why, *sorted(names)), message, code)

    def early_write(self, how: Write, scale: float, as_error: bool) -> None:
        """Warn, or raise, that scaled gradients were clipped or divided."""
        seen, remedy, code = _WRITES[how]
        message = f"{seen} at S = {scale:g}. {remedy}"
        if as_error:
            raise OrderError(message, code=code)
        self._warn(how, message, code)

    def scaled_twice(self, as_error: bool) -> None:
        """Warn, or raise, that the loss is what `scale()` returned."""
        message = (
            "The loss was already scaled: it is what scale() returned. step() divides "
            "the gradients by the scale once, so they will be too large by the factor "
            "of the scale. Call scaler.scale(loss) once."
        )
        if as_error:
            raise OrderError(message, code="GS102")
        self._warn("twice", message, "GS102")

    def _warn(self, key: object, message: str, code: str) -> None:
        if key not in self._issued:
            self._issued.add(key)
            warn_at_caller(GradscaleWarning(message, code=code))


def warn_at_caller(warning: GradscaleWarning) -> None:
    """Issue a warning at the line that called into gradscale or torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)


def float16_remedy(optimizer: Any = None) -> str:
    """Return the ways to train float16 parameters, the simplest first.

    >>> float16_remedy()
    'Use an optimizer of gradscale.torch.optim; or wrap this one: optimizer = gradscale.torch.master_weights(optimizer); or, for LoRA, call gradscale.torch.fp32_trainable_(model) and compute under torch.autocast.'

    Args:
        optimizer: The one that is in use, if that is known.
    """  # noqa: E501
    kind = type(optimizer).__name__
    first = "Use an optimizer of gradscale.torch.optim"
    if kind in ("Adam", "AdamW", "SGD", "Lion"):
        first = f"Use from gradscale.torch.optim import {kind}"
    return (
        f"{first}; or wrap this one: optimizer = "
        "gradscale.torch.master_weights(optimizer); or, for LoRA, call "
        "gradscale.torch.fp32_trainable_(model) and compute under torch.autocast."
    )


def has_steps(optimizer: Any) -> bool:
    """Return whether the optimizer's state is that of earlier steps. No host sync.

    Reads the state of one parameter. A count of steps is read only where that needs no
    wait; one on a device is assumed positive. An optimizer that keeps no state,
    such as SGD without momentum, looks like a new one.
    """
    states = getattr(optimizer, "state", None)
    if not isinstance(states, Mapping):
        return False
    made = (state for state in states.values() if isinstance(state, Mapping) and state)
    first = next(made, None)
    return first is not None and _is_used(first)


def _is_used(state: Mapping[str, Any]) -> bool:
    if state.keys() == {"master"}:
        # Created with the optimizer.
        return False
    # Some optimizers, such as torch's Adagrad, create their state with a count of 0.
    step = state.get("step", 1)
    if isinstance(step, (int, float)):
        return step > 0
    on_host = type(step) is Tensor and step.device.type == "cpu"
    counts = on_host and step.numel() == 1
    if not counts or step.dtype not in (torch.float32, torch.float64):
        return True
    return step.item() > 0.0


def collapsed(
    record: StepRecord, policy: AnyPolicy, culprits: Sequence[str], finding: str = ""
) -> ScaleCollapsed:
    """Return the error for a scale that stays at its floor.

    Args:
        record: The last step.
        policy: Has the floor.
        culprits: The names of non-finite tensors.
        finding: The text of the finding, which is then not printed separately.
    """
    listed = f" Not finite: {', '.join(culprits[:5])}." if culprits else ""
    loss = "finite" if record.loss_finite else "itself not finite"
    return ScaleCollapsed(
        f"The scale has fallen to its floor of {policy.min_scale:g} and the gradients "
        f"were still not finite, {record.floor_steps} steps in a row; the loss was "
        f"{loss}.{listed} A lower scale cannot help, so the cause is not the scale: "
        "a loss, an input or a weight that is not finite. Every step with non-finite "
        "gradients was skipped: the weights are those of the last applied step. Check "
        "the batch, the loss and the weights, and continue from here, or from a "
        "checkpoint if the weights are not finite or the loss rose before."
        + (f"\n{finding}" if finding else ""),
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
            f"update({new_scale!r}) requests a scale outside "
            f"[{policy.min_scale:g}, {policy.max_scale:g}]. It would violate the "
            "bounds of the policy. Pass a scale inside them, or widen them with "
            "policy=DynamicScale(min_scale=..., max_scale=...).",
            code="GS101",
        )
    return torch.full_like(like, number)


def not_scaled(funcname: str, missing: str) -> OrderError:
    """Return the error for a call before the first `scale()`."""
    return _order(
        f"{funcname} came before the first scale(). The gradients cannot have been "
        "scaled. Call scaler.scale(loss).backward() first.",
        f"Attempted {funcname} but {missing} is None.  This may indicate your script "
        "did not use scaler.scale(loss or outputs) earlier in the iteration.",
    )


def unscaled_before(stepped: bool) -> OrderError:
    """Return the error for a second `unscale_()`."""
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
    """Return the error for a second `step()`."""
    return _order(
        "step() was called twice for one optimizer. The second one would apply the "
        "same gradients again. Call update() after each step.",
        "step() has already been called since the last update().",
    )


def clipped_late(optimizer: Any) -> OrderError:
    """Return the error for a clip after the step."""
    return OrderError(
        f"clip_grad_norm_() was called after step() of {type(optimizer).__name__}. "
        "Its gradients are already used. Call clip_grad_norm_() before step().",
        code="GS102",
    )


def nothing_to_update() -> OrderError:
    """Return the error for an `update()` without a step."""
    return _order(
        "update() was called and scaler.step() was not, since the last update(). There "
        "is nothing to move the scale by. If you called optimizer.step() yourself, it "
        "used gradients that are still multiplied by the scale: call "
        "scaler.step(optimizer) instead. With gradient accumulation, call update() "
        "only after the step of the last micro-batch. To abandon an iteration, call "
        "reset().",
        "No inf checks were recorded prior to update.",
    )


def pickled_inside() -> OrderError:
    """Return the error for a scaler that is pickled within an iteration."""
    return _order(
        "The scaler was pickled or copied in the middle of an iteration. What the "
        "optimizers have done so far would be lost. Do it after update().",
        "A GradScaler instance may only be pickled at the beginning of an iteration, "
        "or at the end after scaler.update().",
    )


def pickled_with_group() -> ConfigError:
    """Return the error for a scaler that is pickled with a process group."""
    return ConfigError(
        "A scaler with a process_group was pickled or copied. A process group exists "
        "in this process only, and without it the copy would decide alone. Save "
        "state_dict() and load it into a new scaler.",
        code="GS101",
    )


def no_model() -> ConfigError:
    """Return the error for `diagnose()` without a model."""
    return ConfigError(
        "diagnose() was called on a scaler that knows no model, and none that holds "
        "the parameters of its last step was found. There are no modules to name. Pass "
        "model= to the scaler.",
        code="GS101",
    )


def no_buffers() -> ConfigError:
    """Return the error for `guard_buffers` without a model."""
    return ConfigError(
        "guard_buffers=True was given without model=. The buffers to restore after a "
        "skipped step are those of the model. Pass model=model too.",
        code="GS101",
    )


def closure_given() -> OrderError:
    """Return the error for `step()` with a closure."""
    return OrderError(
        "step() was given a closure. It would make gradients that are scaled and "
        "unchecked, and apply them. Call gradscale.torch.step_with_closure(scaler, "
        "optimizer, closure), or run the closure yourself before step().",
        code="GS108",
        replaces="Closure use is not currently supported if GradScaler is enabled.",
    )


def closure_wanted(optimizer: Any) -> OrderError:
    """Return the error for `step()` of an optimizer that requires a closure."""
    kind = type(optimizer).__name__
    return OrderError(
        f"{kind}.step() takes a closure: it evaluates the loss several times. "
        "scaler.step() runs no closure, as it could not check its gradients. Call "
        "gradscale.torch.step_with_closure(scaler, optimizer, closure).",
        code="GS108",
    )


def inside_loss_block(funcname: str) -> OrderError:
    """Return the error for a call inside the block of `scaler.loss`."""
    return OrderError(
        f"{funcname}() was called inside a `with scaler.loss(...)` block. The "
        "gradients of that loss are brought to the common scale when the block ends, "
        "so they cannot be used yet. Put only backward() into the block, and "
        f"{funcname}() after it.",
        code="GS102",
    )


def _order(message: str, torch_says: str) -> OrderError:
    return OrderError(message, code="GS102", replaces=torch_says)


def mark_called(optimizer: Any) -> None:
    """Keep LR schedulers from warning that the first step was never called."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True
