"""The end of a step: facts in, the next state and the step's rows out, in place."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.torch.gradients import largest
from gradscale.torch.ledger import Account, Ledger
from gradscale.torch.rule import move_, moves_as_torch


class Part(NamedTuple):
    """What one optimizer contributes to a step.

    Attributes:
        account: Where its row and tally are kept.
        scale: f32[], the scale behind its gradients.
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


def settle(
    policy: AnyPolicy,
    state: FixedState | ScaleState,
    ledger: Ledger,
    parts: Sequence[Part],
    *,
    hold_on_bad_loss: bool,
    forced_scale: Tensor | None,
) -> None:
    """Move the state and write the rows, in place. No host sync.

    Args:
        policy: Its rule moves the state.
        state: The tensors that hold the state.
        ledger: What the device remembers beside it.
        parts: At least one.
        hold_on_bad_loss: Keep the state while the loss itself is not finite.
        forced_scale: f32[], taken instead of the rule's if it is within the bounds.
    """
    whole = parts[0] if len(parts) == 1 else _together(ledger, parts)
    before = state.scale.clone()
    # A scale that cannot move has no floor to fall to.
    if policy.min_scale < policy.max_scale:
        stuck = whole.skip * (before <= policy.min_scale)
        ledger.floor_steps.copy_(torch.addcmul(stuck, stuck, ledger.floor_steps))
    if forced_scale is not None:
        force_scale(policy, state, ledger, forced_scale)
    elif moves_as_torch(policy) and not hold_on_bad_loss:
        move_(policy, state, whole.skip)
    else:
        _move_by_rule(policy, state, ledger, whole, hold_on_bad_loss)
    if len(parts) == 1:
        _write(ledger, whole, [whole.account, ledger.total])
    else:
        for part in (*parts, whole):
            _write(ledger, part, [part.account])
    ledger.uncalibrated.mul_(whole.skip)
    ledger.grown.copy_(state.scale > before)
    ledger.loss_trace.zero_()


def force_scale(
    policy: AnyPolicy, state: FixedState | ScaleState, ledger: Ledger, scale: Tensor
) -> None:
    """Set the scale, or note that it is out of bounds. No host sync."""
    fits = (scale >= policy.min_scale) & (scale <= policy.max_scale)
    ledger.refused.copy_(~fits)
    state.scale.copy_(torch.where(fits, scale, state.scale))


def settle_idle(ledger: Ledger, accounts: Sequence[Account]) -> None:
    """Write the rows of those for whom no gradient was there. No host sync."""
    zero = ledger.zero
    scale = ledger.used_scale
    row = _row(ledger, scale, zero, zero, zero, zero, zero, zero, ledger.unasked)
    for account in accounts:
        account.row.copy_(row)
        account.tally[0].add_(1)


def _move_by_rule(
    policy: AnyPolicy,
    state: FixedState | ScaleState,
    ledger: Ledger,
    whole: Part,
    hold_on_bad_loss: bool,
) -> None:
    seen = Observed(
        finite=whole.skip == 0.0,
        amax=ledger.zero if whole.amax is None else whole.amax,
        loss_finite=ledger.loss_trace == 0.0,
    )
    # mypy cannot see that the state is of the policy's own type.
    moved: Any = policy.next_state(state, seen, torch.where)  # type: ignore[arg-type]
    # In place: a captured graph holds these very tensors.
    for kept, value in zip(state, moved, strict=True):
        if hold_on_bad_loss:
            value = torch.where(seen.loss_finite, value, kept)
        kept.copy_(value)


def _together(ledger: Ledger, parts: Sequence[Part]) -> Part:
    """Return what the optimizers did, as if they were one."""
    stepped = [part for part in parts if part.stepped]
    norms = [part.norm for part in parts if part.norm is not None]
    bad_norms = [part.norm_found for part in parts if part.norm_found is not None]
    peaks = [part.amax for part in parts if part.amax is not None]
    return Part(
        account=ledger.total,
        scale=ledger.used_scale,
        stepped=bool(stepped),
        skip=largest([part.skip for part in parts]),
        found=largest([part.found for part in parts]),
        norm_found=largest(bad_norms) if bad_norms else None,
        # Optimizers clipped together share one norm; else this is the largest.
        norm=largest(norms) if norms else None,
        amax=largest(peaks) if peaks else None,
    )


def _write(ledger: Ledger, part: Part, accounts: Sequence[Account]) -> None:
    zero, one = ledger.zero, ledger.one
    stepped = one if part.stepped else zero
    skipped = part.skip if part.stepped else zero
    row = _row(
        ledger,
        part.scale,
        stepped,
        skipped,
        part.found,
        zero if part.norm_found is None else part.norm_found,
        one,
        zero if part.amax is None else part.amax,
        ledger.unasked if part.norm is None else part.norm,
    )
    counts = torch.stack((one, stepped, skipped)).long()
    for account in accounts:
        account.row.copy_(row)
        account.tally.add_(counts)


def _row(
    ledger: Ledger,
    scale: Tensor,
    stepped: Tensor,
    skipped: Tensor,
    found: Tensor,
    norm_found: Tensor,
    was_read: Tensor,
    amax: Tensor,
    norm: Tensor,
) -> Tensor:
    """Return a row in the order of `ledger.ROW`."""
    return torch.stack(
        (
            scale,
            stepped,
            skipped,
            found,
            ledger.loss_trace,
            norm_found,
            was_read,
            ledger.uncalibrated,
            ledger.grown,
            ledger.floor_steps,
            amax,
            norm,
            ledger.refused,
        )
    )
