"""The end of a step: moves the policy's state and writes the step's rows, in place.

One launch where kernels run and one optimizer stepped; plain operations otherwise.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.torch.device_state.layout import (
    RING,
    DeviceState,
    Persistent,
    StepTotals,
)
from gradscale.torch.grads.stats import largest
from gradscale.torch.kernels import Kernels, usable


class StepSummary(NamedTuple):
    """The contribution of one optimizer to an update.

    Attributes:
        totals: Its last row and its counts.
        scale: f32[], the scale of its gradients.
        stepped: Its `step()` ran; else it was only unscaled.
        skip: f32[], 1 if its step was to be skipped, else 0.
        nonfinite: f32[], 1 if an element was not finite, else 0.
        norm_unusable: f32[], 1 if the norm was not usable, else 0; None without a norm.
        norm: f32[], the norm of the unscaled gradients, or None.
        amax: f32[], the largest scaled magnitude, or None if it was not read.
    """

    totals: StepTotals
    scale: Tensor
    stepped: bool
    skip: Tensor
    nonfinite: Tensor
    norm_unusable: Tensor | None
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
    rule_skip: Tensor | None = None,
) -> None:
    """Move the scale and write the rows, in place. No host sync.

    Args:
        policy: Its rule moves the scale.
        scaling: The tensors that hold the policy's state.
        state: The rest of the device state.
        steps: At least one.
        hold_on_bad_loss: Keep the scale while the loss itself is not finite.
        forced_scale: f32[], taken instead of the rule's if it is within the bounds.
        kernels: Whether a single kernel may run the update, which one optimizer allows.
        rule_skip: f32[], overrides the skip that the policy observes; with several
            losses, 1 if the one that this scale multiplies was not finite, else 0.
    """
    alone = len(steps) == 1
    plain = forced_scale is not None or rule_skip is not None
    if alone and not plain and usable(kernels, scaling.scale.device):
        # Imported here: Triton may be missing.
        from gradscale.torch.device_state.update_kernel import update_one_

        update_one_(policy, scaling, state, steps[0], hold_on_bad_loss)
        return
    ops = _ops_for(scaling.scale)
    persistent = ops.persistent(state)
    present = type(scaling)(*map(ops.number, scaling))
    rows = [_facts(one, ops) for one in steps]
    whole = rows[0] if alone else _joined(rows, ops.number(state.used_scale), ops)
    skip = whole.skip if rule_skip is None else ops.number(rule_skip)
    finite, loss_finite = skip == 0.0, persistent.loss_trace == 0.0
    floor_steps = persistent.floor_steps
    # A scale that cannot move has no floor.
    if policy.min_scale < policy.max_scale:
        stuck = skip * (present.scale <= policy.min_scale)
        floor_steps = stuck * (floor_steps + 1.0)
    refused = persistent.refused
    if forced_scale is None:
        observed = Observed(finite, whole.amax, loss_finite)
        # mypy cannot see that the state is of the policy's own type.
        moved: Any = policy.next_state(present, observed, ops.where)  # type: ignore[arg-type]
        if hold_on_bad_loss:
            pairs = zip(moved, present, strict=True)
            moved = [ops.where(loss_finite, new, old) for new, old in pairs]
    else:
        given = ops.number(forced_scale)
        fits = (given >= policy.min_scale) & (given <= policy.max_scale)
        refused = ops.where(fits, ops.zero, ops.one)
        moved = present._replace(scale=ops.where(fits, given, present.scale))
    now = persistent._replace(floor_steps=floor_steps, refused=refused)
    uncalibrated = persistent.uncalibrated * whole.skip
    grown = ops.where(moved[0] > present.scale, ops.one, ops.zero)
    then = Persistent(ops.zero, uncalibrated, grown, floor_steps, refused, ops.nan)
    if not alone:
        for one, row in zip(steps, rows, strict=True):
            _write_row(state, [one.totals], row.fields(now), ops)
    totals = [state.total, steps[0].totals] if alone else [state.total]
    _write_row(state, totals, whole.fields(now), ops, then)
    # In place: a captured graph holds these very tensors.
    for tensor, old, new in zip(scaling, present, moved, strict=True):
        if new is not old:
            ops.assign(tensor, new)


def force_scale_(
    policy: AnyPolicy,
    scaling: FixedState | ScaleState,
    state: DeviceState,
    scale: Tensor,
) -> None:
    """Set the scale, or note that it is out of bounds. No host sync."""
    fits = (scale >= policy.min_scale) & (scale <= policy.max_scale)
    state.fields.refused.copy_(~fits)
    scaling.scale.copy_(torch.where(fits, scale, scaling.scale))


def update_idle_(
    state: DeviceState, totals: Sequence[StepTotals], *, whole: bool
) -> None:
    """Write the rows of optimizers without a gradient. No host sync.

    Args:
        state: The device state.
        totals: Those of these optimizers.
        whole: No other optimizer had a gradient: the step as a whole was idle.
    """
    ops = _ops_for(state.used_scale)
    zero, persistent = ops.zero, ops.persistent(state)
    scale = ops.number(state.used_scale)
    idle = _Facts(zero, zero, zero, scale, zero, zero, zero, ops.unasked, zero)
    row = idle.fields(persistent)
    if whole:
        then = persistent._replace(loss_trace=zero, loss=ops.nan)
        _write_row(state, [*totals, state.total], row, ops, then)
    elif totals:
        _write_row(state, list(totals), row, ops)
    # What is counted is `read`, which is 0 here.
    for each in [*totals, state.total] if whole else totals:
        each.counts[0].add_(1)


class _Ops(NamedTuple):
    """The operations of an update: on tensors, or on Python numbers for a CPU.

    Attributes:
        zero, one, unasked, nan: 0, 1, -1 and NaN.
        number: Converts a scalar tensor to such a value.
        persistent: Returns the persistent values of a state.
        where: Selects a value by a condition.
        largest: Returns the maximum of some values; NaN if any is NaN.
        pack: Returns values as f32[n].
        assign: Writes a value into a scalar tensor.
    """

    zero: Any
    one: Any
    unasked: Any
    nan: Any
    number: Callable[[Tensor], Any]
    persistent: Callable[[DeviceState], Persistent]
    where: Callable[[Any, Any, Any], Any]
    largest: Callable[[list[Any]], Any]
    pack: Callable[[Sequence[Any]], Tensor]
    assign: Callable[[Tensor, Any], Any]


def _choose(cond: bool, a: Any, b: Any) -> Any:
    return a if cond else b


def _largest_number(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


_ON_HOST = _Ops(
    0.0,
    1.0,
    -1.0,
    math.nan,
    Tensor.item,
    lambda state: Persistent(*state.persistent.tolist()),
    _choose,
    _largest_number,
    partial(torch.tensor, dtype=torch.float32),
    Tensor.fill_,
)


def _ops_for(scale: Tensor) -> _Ops:
    # A fake tensor has no value to read.
    plain = type(scale) is Tensor and scale.device.type == "cpu"
    if plain and not torch.compiler.is_compiling():
        return _ON_HOST
    return _on_device(scale)


def _on_device(scale: Tensor) -> _Ops:
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    return _Ops(
        zero,
        one,
        -one,
        torch.full_like(scale, math.nan),
        lambda tensor: tensor,
        lambda state: Persistent(*state.persistent.clone().unbind()),
        torch.where,
        largest,
        lambda values: torch.stack(list(values)),
        Tensor.copy_,
    )


class _Facts(NamedTuple):
    """The facts of one optimizer's step, by `_Ops`; fields as in `StepFacts`."""

    read: Any
    stepped: Any
    skipped: Any
    scale: Any
    nonfinite: Any
    norm_unusable: Any
    amax: Any
    grad_norm: Any
    skip: Any

    def fields(self, persistent: Persistent) -> list[Any]:
        """Return the fields of a row, in order."""
        return [*self[:-1], *persistent]


def _facts(one: StepSummary, ops: _Ops) -> _Facts:
    number, skip = ops.number, ops.number(one.skip)
    return _Facts(
        read=ops.one,
        stepped=ops.one if one.stepped else ops.zero,
        skipped=skip if one.stepped else ops.zero,
        scale=number(one.scale),
        nonfinite=number(one.nonfinite),
        norm_unusable=ops.zero
        if one.norm_unusable is None
        else number(one.norm_unusable),
        amax=ops.zero if one.amax is None else number(one.amax),
        grad_norm=ops.unasked if one.norm is None else number(one.norm),
        skip=skip,
    )


def _joined(rows: list[_Facts], scale: Any, ops: _Ops) -> _Facts:
    """Return the steps of several optimizers as one: the maximum of each fact.

    Optimizers clipped together share one norm. Non-finite gradients of one optimizer
    make the whole a skipped step, even if that optimizer was only unscaled.
    """
    columns = zip(*rows, strict=True)
    whole = _Facts(*(ops.largest(list(each)) for each in columns))
    return whole._replace(scale=scale, skipped=whole.stepped * whole.skip)


def _write_row(
    state: DeviceState,
    totals: list[StepTotals],
    fields: list[Any],
    ops: _Ops,
    then: Persistent | None = None,
) -> None:
    """Write one row for these totals and count it.

    Args:
        state: The device state.
        totals: The totals that get the row.
        fields: The fields of the row, in order.
        ops: The operations on the fields.
        then: For the row of the whole step, which goes into the ring: the values that
            persist for the next step.
    """
    row = ops.pack(fields)
    copied, copies = [each.row for each in totals], [row] * len(totals)
    if then is not None:
        if ops is _ON_HOST:
            copied.append(state.ring[state.total.counts.tolist()[0] % RING])
            copies.append(row)
        else:
            place = state.total.counts[:1] % RING
            state.ring.index_copy_(0, place, row.unsqueeze(0))
        copied.append(state.persistent)
        copies.append(ops.pack(then))
    # One launch each, for any number of totals.
    torch._foreach_copy_(copied, copies)
    counts = row[:3].long()
    torch._foreach_add_([each.counts for each in totals], [counts] * len(totals))
