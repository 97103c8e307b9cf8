"""The end of a step: facts in, the next state and the step's rows out, in place."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.torch.ledger import Account, Ledger


class Part(NamedTuple):
    """What one optimizer contributes to a step.

    Attributes:
        account: Where its row and tally are kept.
        stepped: Its `step()` ran; else it was only unscaled.
        skip: f32[], 1 if its step was to be skipped, else 0.
        found: f32[], 1 if an element was not finite, else 0.
        norm_found: f32[], 1 if the norm was not usable, else 0; None without a norm.
        norm: f32[], the norm of the unscaled gradients, or None.
        amax: f32[], the largest scaled magnitude, or None if it was not read.
    """

    account: Account
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
    skip = _any([part.skip for part in parts])
    amax = [part.amax for part in parts if part.amax is not None]
    seen = Observed(
        finite=skip == 0.0,
        amax=torch.stack(amax).amax() if amax else skip,
        loss_finite=ledger.loss_finite > 0.0,
    )
    if forced_scale is None:
        # mypy cannot see that the state is of the policy's own type.
        moved: Any = policy.next_state(state, seen, torch.where)  # type: ignore[arg-type]
        if hold_on_bad_loss:
            moved = _hold(moved, state, seen.loss_finite)
    else:
        moved = _forced(policy, state, ledger, forced_scale)
    _count_floor(policy, state, ledger, seen.finite)
    _write_rows(ledger, parts, seen.amax)
    ledger.calibrated.copy_(torch.maximum(ledger.calibrated, seen.finite.float()))
    ledger.grown.copy_(moved.scale > state.scale)
    ledger.loss_finite.fill_(1.0)
    # In place: a captured graph holds these very tensors.
    for kept, value in zip(state, moved, strict=True):
        kept.copy_(value)


def force_scale(
    policy: AnyPolicy, state: FixedState | ScaleState, ledger: Ledger, scale: Tensor
) -> None:
    """Set the scale without a step. No host sync."""
    state.scale.copy_(_forced(policy, state, ledger, scale).scale)


def settle_idle(ledger: Ledger, accounts: Sequence[Account]) -> None:
    """Write the rows of those for whom no gradient was there. No host sync."""
    one = torch.ones_like(ledger.used_scale)
    row = _row(ledger, 0.0 * one, one, one, 0.0 * one, 0.0 * one, -one)
    for account in accounts:
        account.row.copy_(row)
        account.tally[0].add_(1)


def _hold(
    moved: FixedState | ScaleState, state: FixedState | ScaleState, keep: Tensor
) -> FixedState | ScaleState:
    return type(state)(
        *(torch.where(keep, new, old) for new, old in zip(moved, state, strict=True))
    )


def _forced(
    policy: AnyPolicy,
    state: FixedState | ScaleState,
    ledger: Ledger,
    scale: Tensor,
) -> FixedState | ScaleState:
    fits = (scale >= policy.min_scale) & (scale <= policy.max_scale)
    ledger.refused.copy_(~fits)
    return state._replace(scale=torch.where(fits, scale, state.scale))


def _count_floor(
    policy: AnyPolicy, state: FixedState | ScaleState, ledger: Ledger, finite: Tensor
) -> None:
    # A scale that cannot move has no floor to fall to.
    if policy.min_scale == policy.max_scale:
        return
    stuck = (state.scale <= policy.min_scale) & ~finite
    ledger.floor_steps.copy_(torch.where(stuck, ledger.floor_steps + 1.0, 0.0))


def _write_rows(ledger: Ledger, parts: Sequence[Part], amax: Tensor) -> None:
    one = torch.ones_like(ledger.used_scale)
    for part in parts:
        applied = 1.0 - part.skip if part.stepped else 0.0 * one
        row = _row(
            ledger,
            applied,
            1.0 - part.found,
            one if part.norm_found is None else 1.0 - part.norm_found,
            one,
            part.skip if part.amax is None else part.amax,
            -one if part.norm is None else part.norm,
        )
        part.account.row.copy_(row)
        _add(part.account.tally, one, applied, part.stepped)
    if len(parts) == 1:
        ledger.total.row.copy_(row)
        _add(ledger.total.tally, one, applied, parts[0].stepped)
        return
    stepped = [part for part in parts if part.stepped]
    applied = 1.0 - _any([part.skip for part in stepped]) if stepped else 0.0 * one
    bad_norms = [part.norm_found for part in parts if part.norm_found is not None]
    norms = [part.norm for part in parts if part.norm is not None]
    row = _row(
        ledger,
        applied,
        1.0 - _any([part.found for part in parts]),
        1.0 - _any(bad_norms) if bad_norms else one,
        one,
        amax,
        # Optimizers clipped together share one norm; else this is the largest.
        torch.stack(norms).amax() if norms else -one,
    )
    ledger.total.row.copy_(row)
    _add(ledger.total.tally, one, applied, bool(stepped))


def _row(
    ledger: Ledger,
    applied: Tensor,
    finite: Tensor,
    norm_finite: Tensor,
    was_read: Tensor,
    amax: Tensor,
    norm: Tensor,
) -> Tensor:
    """Return a row in the order of `ledger.ROW`."""
    return torch.stack(
        (
            ledger.used_scale,
            applied,
            finite,
            ledger.loss_finite,
            norm_finite,
            was_read,
            ledger.calibrated,
            ledger.grown,
            ledger.floor_steps,
            amax,
            norm,
            ledger.refused,
        )
    )


def _add(tally: Tensor, one: Tensor, applied: Tensor, stepped: bool) -> None:
    skipped = one - applied if stepped else applied
    tally.add_(torch.stack((one, applied, skipped)).long())


def _any(flags: Sequence[Tensor]) -> Tensor:
    return flags[0] if len(flags) == 1 else torch.stack(list(flags)).amax()
