"""The end of a step: facts in, the next state and the step's rows out, in place."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.torch.device_state.host_copy import Mailbox
from gradscale.torch.device_state.layout import RING, Account, Facts, Ledger
from gradscale.torch.device_state.rule import move_, moves_as_torch
from gradscale.torch.grads.stats import largest
from gradscale.torch.kernels import Kernels, usable


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
    kernels: Kernels,
    mailbox: Mailbox | None = None,
) -> None:
    """Move the state and write the rows, in place. No host sync.

    Args:
        policy: Its rule moves the state.
        state: The tensors that hold the state.
        ledger: What the device remembers beside it.
        parts: At least one.
        hold_on_bad_loss: Keep the state while the loss itself is not finite.
        forced_scale: f32[], taken instead of the rule's if it is within the bounds.
        kernels: Whether one kernel may do all of it; it can for one part.
        mailbox: The kernel writes a letter to it; None while the host may not act.
    """
    alone = len(parts) == 1
    if alone and forced_scale is None and usable(kernels, state.scale.device):
        # Here, for Triton may be missing.
        from gradscale.torch.kernels.update import settle_

        settle_(policy, state, ledger, parts[0], hold_on_bad_loss, mailbox)
        return
    whole = parts[0] if alone else _together(ledger, parts)
    kept = ledger.fields
    # A scale that cannot move has no floor to fall to.
    if policy.min_scale < policy.max_scale:
        stuck = whole.skip * (state.scale <= policy.min_scale)
        torch.addcmul(stuck, stuck, kept.floor_steps, out=kept.floor_steps)
    given = None
    if forced_scale is not None:
        given = _admitted(policy, state, ledger, forced_scale)
    if not alone:
        for part in parts:
            _draft(ledger, _facts(ledger, part), state.scale)
            _enter(ledger, [part.account], whole=False)
    _draft(ledger, _facts(ledger, whole), state.scale)
    if given is not None:
        state.scale.copy_(given)
    elif moves_as_torch(policy) and not hold_on_bad_loss:
        move_(policy, state, whole.skip)
    else:
        _move_by_rule(policy, state, ledger, whole, hold_on_bad_loss)
    _enter(ledger, [whole.account] if alone else [], whole=True)
    kept.uncalibrated.mul_(whole.skip)
    torch.gt(state.scale, ledger.draft.before, out=kept.grown)


def force_scale(
    policy: AnyPolicy, state: FixedState | ScaleState, ledger: Ledger, scale: Tensor
) -> None:
    """Set the scale, or note that it is out of bounds. No host sync."""
    state.scale.copy_(_admitted(policy, state, ledger, scale))


def _admitted(
    policy: AnyPolicy, state: FixedState | ScaleState, ledger: Ledger, scale: Tensor
) -> Tensor:
    """Return a scale that was given, or the old one and note that it is not within."""
    fits = (scale >= policy.min_scale) & (scale <= policy.max_scale)
    ledger.fields.refused.copy_(~fits)
    return torch.where(fits, scale, state.scale)


def settle_idle(ledger: Ledger, accounts: Sequence[Account], *, whole: bool) -> None:
    """Write the rows of those for whom no gradient was there. No host sync.

    Args:
        ledger: What the device remembers.
        accounts: The accounts of the idle optimizers.
        whole: No other optimizer had a gradient: the step as a whole was idle.
    """
    zero = ledger.zero
    facts = Facts(
        read=zero,
        stepped=zero,
        skipped=zero,
        scale=ledger.used_scale,
        found=zero,
        norm_found=zero,
        amax=zero,
        grad_norm=ledger.unasked,
    )
    _draft(ledger, facts, zero)
    _enter(ledger, accounts, whole=whole)
    # A row counts as an update by what was read: nothing, here.
    for account in [*accounts, ledger.total] if whole else accounts:
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
        loss_finite=ledger.fields.loss_trace == 0.0,
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


def _facts(ledger: Ledger, part: Part) -> Facts:
    zero, one = ledger.zero, ledger.one
    return Facts(
        read=one,
        stepped=one if part.stepped else zero,
        skipped=part.skip if part.stepped else zero,
        scale=part.scale,
        found=part.found,
        norm_found=zero if part.norm_found is None else part.norm_found,
        amax=zero if part.amax is None else part.amax,
        grad_norm=ledger.unasked if part.norm is None else part.norm,
    )


def _draft(ledger: Ledger, facts: Facts, scale: Tensor) -> None:
    """Write a row as it stands before the state moves, and the scale."""
    torch.stack((*facts, *ledger.fields, scale), out=ledger.draft.sheet)


def _enter(ledger: Ledger, accounts: Sequence[Account], *, whole: bool) -> None:
    """Enter the drafted row and count it, for the accounts.

    Args:
        ledger: What the device remembers.
        accounts: Whose row it is.
        whole: Also for the total and its ring; no loss is behind the next row yet.
    """
    draft, copied = ledger.draft, [account.row for account in accounts]
    entries = [draft.row] * len(copied)
    if whole:
        accounts = [*accounts, ledger.total]
        place = ledger.total.tally[:1] % RING
        ledger.ring.index_copy_(0, place, draft.line)
        copied += [ledger.total.row, ledger.fields.loss_trace]
        entries += [draft.row, ledger.zero]
    # One launch, where each copy by itself would be one.
    torch._foreach_copy_(copied, entries)
    # A tally counts the first fields of a row.
    counts = draft.flags.long()
    torch._foreach_add_(
        [account.tally for account in accounts], [counts] * len(accounts)
    )
