"""The end of a step: moves the policy's state and writes the step's rows, in place.

One launch where kernels run and one optimizer stepped; plain operations otherwise.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.torch.device_state.layout import (
    RING,
    Account,
    DeviceState,
    StepFacts,
)
from gradscale.torch.devices import host_value
from gradscale.torch.grads.stats import largest
from gradscale.torch.kernels import Kernels, usable


class StepSummary(NamedTuple):
    """What one optimizer contributes to an update.

    Attributes:
        account: Where its row and tally are kept.
        scale: f32[], the scale of its gradients.
        stepped: Its `step()` ran; else it was only unscaled.
        skip: f32[], 1 if its step was to be skipped, else 0.
        found: f32[], 1 if an element was not finite, else 0.
        norm_found: f32[], 1 if the norm was not usable, else 0; None without a norm.
        norm: f32[], the norm of the unscaled gradients, or None.
        amax: f32[], the largest scaled magnitude, or None if it was not read.
    """

    account: Account
    scale: Tensor
    stepped: bool
    skip: Tensor
    found: Tensor
    norm_found: Tensor | None
    norm: Tensor | None
    amax: Tensor | None


def update_(
    policy: AnyPolicy,
    scaling: FixedState | ScaleState,
    state: DeviceState,
    steps: Sequence[StepSummary],
    *,
    hold_on_bad_loss: bool,
    forced_scale: Tensor | None,
    kernels: Kernels,
) -> None:
    """Move the scale and write the rows, in place. No host sync.

    Args:
        policy: Its rule moves the scale.
        scaling: The tensors that hold the policy's state.
        state: The rest of the device state.
        steps: At least one.
        hold_on_bad_loss: Keep the scale while the loss itself is not finite.
        forced_scale: f32[], taken instead of the rule's if it is within the bounds.
        kernels: Whether one kernel may do all of it; it can for one optimizer.
    """
    alone = len(steps) == 1
    if alone and forced_scale is None and usable(kernels, scaling.scale.device):
        # Here, for Triton may be missing.
        from gradscale.torch.device_state.update_kernel import update_one_

        update_one_(policy, scaling, state, steps[0], hold_on_bad_loss)
        return
    whole = steps[0] if alone else _joined(state, steps)
    fields = state.fields
    # A scale that cannot move has no floor to fall to.
    if policy.min_scale < policy.max_scale:
        stuck = whole.skip * (scaling.scale <= policy.min_scale)
        torch.addcmul(stuck, stuck, fields.floor_steps, out=fields.floor_steps)
    given = None
    if forced_scale is not None:
        given = _admitted(policy, scaling, state, forced_scale)
    if not alone:
        for one in steps:
            _write_row(state, _facts(state, one), scaling.scale, [one.account])
    _write_row(
        state,
        _facts(state, whole),
        scaling.scale,
        [whole.account, state.total] if alone else [state.total],
        in_ring=True,
    )
    if given is not None:
        scaling.scale.copy_(given)
    else:
        _move(policy, scaling, state, whole, hold_on_bad_loss)
    torch._foreach_copy_([fields.loss_trace, fields.loss], [state.zero, state.nan])
    fields.uncalibrated.mul_(whole.skip)
    torch.gt(scaling.scale, state.draft[-1], out=fields.grown)


def force_scale_(
    policy: AnyPolicy,
    scaling: FixedState | ScaleState,
    state: DeviceState,
    scale: Tensor,
) -> None:
    """Set the scale, or note that it is out of bounds. No host sync."""
    scaling.scale.copy_(_admitted(policy, scaling, state, scale))


def update_idle_(
    state: DeviceState, accounts: Sequence[Account], *, whole: bool
) -> None:
    """Write the rows of optimizers without a gradient. No host sync.

    Args:
        state: The device state.
        accounts: The accounts of these optimizers.
        whole: No other optimizer had a gradient: the step as a whole was idle.
    """
    zero = state.zero
    idle = StepFacts(
        read=zero,
        stepped=zero,
        skipped=zero,
        scale=state.used_scale,
        found=zero,
        norm_found=zero,
        amax=zero,
        grad_norm=state.unasked,
    )
    written = [*accounts, state.total] if whole else list(accounts)
    _write_row(state, idle, zero, written, in_ring=whole)
    if whole:
        fields = state.fields
        torch._foreach_copy_([fields.loss_trace, fields.loss], [zero, state.nan])
    # The tally counts `read`, which is 0 here.
    for account in written:
        account.tally[0].add_(1)


def _admitted(
    policy: AnyPolicy,
    scaling: FixedState | ScaleState,
    state: DeviceState,
    scale: Tensor,
) -> Tensor:
    """Return the given scale if it is within the bounds, else the present one."""
    fits = (scale >= policy.min_scale) & (scale <= policy.max_scale)
    state.fields.refused.copy_(~fits)
    return torch.where(fits, scale, scaling.scale)


def _move(
    policy: AnyPolicy,
    scaling: FixedState | ScaleState,
    state: DeviceState,
    whole: StepSummary,
    hold_on_bad_loss: bool,
) -> None:
    """Move the scale by the rule: on host numbers where they are, else on tensors."""
    here: Any = scaling
    where: Any = torch.where
    skip: Any = whole.skip
    trace: Any = state.fields.loss_trace
    if skip.device.type == "cpu" and not torch.compiler.is_compiling():
        here = type(scaling)(*map(host_value, scaling))
        skip, where = host_value(skip), _choose
        trace = host_value(trace) if hold_on_bad_loss else 0.0
    observed = Observed(finite=skip == 0.0, amax=0.0, loss_finite=trace == 0.0)
    moved = policy.next_state(here, observed, where)
    # In place: a captured graph holds these very tensors.
    for tensor, kept, value in zip(scaling, here, moved, strict=True):
        if hold_on_bad_loss:
            value = where(observed.loss_finite, value, kept)
        tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)


def _choose(cond: bool, a: Any, b: Any) -> Any:
    # Rounded to f32 when it is written: a rule multiplies once.
    return a if cond else b


def _joined(state: DeviceState, steps: Sequence[StepSummary]) -> StepSummary:
    """Return the steps of several optimizers as one."""
    norms = [one.norm for one in steps if one.norm is not None]
    bad_norms = [one.norm_found for one in steps if one.norm_found is not None]
    peaks = [one.amax for one in steps if one.amax is not None]
    return StepSummary(
        account=state.total,
        scale=state.used_scale,
        stepped=any(one.stepped for one in steps),
        skip=largest([one.skip for one in steps]),
        found=largest([one.found for one in steps]),
        norm_found=largest(bad_norms) if bad_norms else None,
        # Optimizers clipped together share one norm; else this is the largest.
        norm=largest(norms) if norms else None,
        amax=largest(peaks) if peaks else None,
    )


def _facts(state: DeviceState, one: StepSummary) -> StepFacts:
    zero = state.zero
    return StepFacts(
        read=state.one,
        stepped=state.one if one.stepped else zero,
        skipped=one.skip if one.stepped else zero,
        scale=one.scale,
        found=one.found,
        norm_found=zero if one.norm_found is None else one.norm_found,
        amax=zero if one.amax is None else one.amax,
        grad_norm=state.unasked if one.norm is None else one.norm,
    )


def _write_row(
    state: DeviceState,
    facts: StepFacts,
    scale: Tensor,
    accounts: list[Account],
    *,
    in_ring: bool = False,
) -> None:
    """Write one row for these accounts and count it; `draft` keeps the scale too."""
    draft = torch.stack((*facts, *state.fields, scale), out=state.draft)
    row = draft[:-1]
    if in_ring:
        place = state.total.tally[:1] % RING
        state.ring.index_copy_(0, place, row.unsqueeze(0))
    # One launch each, however many accounts there are.
    torch._foreach_copy_([account.row for account in accounts], [row] * len(accounts))
    counts = row[:3].long()
    torch._foreach_add_(
        [account.tally for account in accounts], [counts] * len(accounts)
    )
