"""The end of a step of one optimizer in one launch: the rule, the row, the counts.

Restates `DynamicScale.next_state` and the plain operations of
`gradscale.torch.device_state.update`, and is tested against both in
tests/torch/device_state/test_update_kernel.py. All arithmetic is f32: factors that are
powers of two give the rule's scales bit for bit, others are within one ulp per move.
"""

from typing import Any

import triton
import triton.language as tl

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.policies import DynamicScale
from gradscale.core.state import FixedState, ScaleState
from gradscale.torch.device_state.layout import PERSISTENT, RING, ROW, DeviceState
from gradscale.torch.kernels import on
from gradscale.torch.kernels.launch import launched

# The work is a single row: one warp.
WARPS = 1


def update_one_(
    policy: AnyPolicy,
    scaling: FixedState | ScaleState,
    state: DeviceState,
    step: Any,
    hold_on_bad_loss: bool,
) -> None:
    """Run `device_state.update.update_` for one optimizer without a forced scale.

    In place, no host sync. All tensors are on one device.

    Args:
        policy: Its rule moves the scale.
        scaling: The tensors that hold the policy's state.
        state: The rest of the device state.
        step: A `StepSummary`.
        hold_on_bad_loss: Keep the scale while the loss itself is not finite.
    """
    moves = isinstance(scaling, ScaleState)
    growth_factor, backoff_factor, growth_interval, period = 1.0, 1.0, 1, 0
    if isinstance(policy, DynamicScale):
        growth_factor, backoff_factor = policy.growth_factor, policy.backoff_factor
        growth_interval, period = policy.growth_interval, policy.period
    with on(scaling.scale.device):
        _update(
            1,
            (
                scaling.scale,
                scaling.finite_steps if isinstance(scaling, ScaleState) else state.debt,
                state.debt,
                state.persistent,
                state.ring,
                state.total.row,
                state.total.counts,
                step.totals.row,
                step.totals.counts,
                step.scale,
                step.skip,
                step.nonfinite,
                state.zero if step.norm_unusable is None else step.norm_unusable,
                state.zero if step.amax is None else step.amax,
                state.unasked if step.norm is None else step.norm,
            ),
            (
                float(step.stepped),
                float(growth_factor),
                float(backoff_factor),
                float(policy.min_scale),
                float(policy.max_scale),
                growth_interval,
                period,
            ),
            MOVES=moves,
            HOLD=hold_on_bad_loss,
        )


_FIELDS = tl.constexpr(len(ROW))
_LANES = tl.constexpr(triton.next_power_of_2(len(ROW)))
_RING = tl.constexpr(RING)
_READ = tl.constexpr(ROW.index("read"))
_STEPPED = tl.constexpr(ROW.index("stepped"))
_SKIPPED = tl.constexpr(ROW.index("skipped"))
_SCALE = tl.constexpr(ROW.index("scale"))
_NONFINITE = tl.constexpr(ROW.index("nonfinite"))
_NORM_UNUSABLE = tl.constexpr(ROW.index("norm_unusable"))
_AMAX = tl.constexpr(ROW.index("amax"))
_GRAD_NORM = tl.constexpr(ROW.index("grad_norm"))
# Persistent values have a vector of their own; in a row they come last.
_PERSISTENT = tl.constexpr(len(ROW) - len(PERSISTENT))
_LOSS_TRACE = tl.constexpr(PERSISTENT.index("loss_trace"))
_UNCALIBRATED = tl.constexpr(PERSISTENT.index("uncalibrated"))
_GROWN = tl.constexpr(PERSISTENT.index("grown"))
_FLOOR_STEPS = tl.constexpr(PERSISTENT.index("floor_steps"))
_REFUSED = tl.constexpr(PERSISTENT.index("refused"))
_LOSS = tl.constexpr(PERSISTENT.index("loss"))


# Each product is rounded, as by the rule. Set explicitly: Triton's default for FP
# fusion changes between versions.
@launched(num_warps=WARPS, enable_fp_fusion=False)
def _update(
    scale_ptr,
    steps_ptr,
    debt_ptr,
    kept_ptr,
    ring_ptr,
    total_row_ptr,
    total_tally_ptr,
    row_ptr,
    tally_ptr,
    used_scale_ptr,
    skip_ptr,
    nonfinite_ptr,
    norm_unusable_ptr,
    amax_ptr,
    norm_ptr,
    stepped,
    growth_factor,
    backoff_factor,
    min_scale,
    max_scale,
    growth_interval,
    period,
    MOVES: tl.constexpr,
    HOLD: tl.constexpr,
):
    scale = tl.load(scale_ptr)
    skip = tl.load(skip_ptr).to(tl.float32)
    finite = skip == 0.0
    loss_trace = tl.load(kept_ptr + _LOSS_TRACE)
    uncalibrated = tl.load(kept_ptr + _UNCALIBRATED)
    grown = tl.load(kept_ptr + _GROWN)
    floor_steps = tl.load(kept_ptr + _FLOOR_STEPS)
    refused = tl.load(kept_ptr + _REFUSED)

    # A scale that cannot move has no floor to fall to.
    stuck = tl.where(scale <= min_scale, skip, 0.0)
    floor_steps = tl.where(
        min_scale < max_scale, stuck * (floor_steps + 1.0), floor_steps
    )

    moved = scale
    if MOVES:
        steps = tl.load(steps_ptr)
        debt = tl.load(debt_ptr)
        due = steps + 1 >= growth_interval
        lower_debt = tl.where(debt > 0, debt - 1, 0)
        forgiven = (lower_debt == 0) & (period > 0)
        raised = scale * growth_factor
        raised = tl.where(due & (raised < float("inf")), raised, scale)
        shrunk = tl.where(forgiven, scale, scale * backoff_factor)
        moved = tl.where(finite, raised, shrunk)
        moved = tl.where(moved > max_scale, max_scale, moved)
        moved = tl.where(moved < min_scale, min_scale, moved)
        next_steps = tl.where(finite & (due == 0), steps + 1, 0)
        next_debt = tl.where((finite == 0) & forgiven, period, lower_debt)
        if HOLD:
            loss_finite = loss_trace == 0.0
            moved = tl.where(loss_finite, moved, scale)
            next_steps = tl.where(loss_finite, next_steps, steps)
            next_debt = tl.where(loss_finite, next_debt, debt)
        tl.store(scale_ptr, moved)
        tl.store(steps_ptr, next_steps)
        tl.store(debt_ptr, next_debt)

    skipped = tl.where(stepped > 0.0, skip, 0.0)
    field = tl.arange(0, _LANES)
    row = tl.where(field == _READ, 1.0, 0.0)
    row = tl.where(field == _STEPPED, stepped, row)
    row = tl.where(field == _SKIPPED, skipped, row)
    row = tl.where(field == _SCALE, tl.load(used_scale_ptr), row)
    nonfinite = tl.load(nonfinite_ptr).to(tl.float32)
    norm_unusable = tl.load(norm_unusable_ptr).to(tl.float32)
    amax = tl.load(amax_ptr).to(tl.float32)
    row = tl.where(field == _NONFINITE, nonfinite, row)
    row = tl.where(field == _NORM_UNUSABLE, norm_unusable, row)
    row = tl.where(field == _AMAX, amax, row)
    row = tl.where(field == _GRAD_NORM, tl.load(norm_ptr).to(tl.float32), row)
    row = tl.where(field == _PERSISTENT + _LOSS_TRACE, loss_trace, row)
    row = tl.where(field == _PERSISTENT + _UNCALIBRATED, uncalibrated, row)
    row = tl.where(field == _PERSISTENT + _GROWN, grown, row)
    row = tl.where(field == _PERSISTENT + _FLOOR_STEPS, floor_steps, row)
    row = tl.where(field == _PERSISTENT + _REFUSED, refused, row)
    row = tl.where(field == _PERSISTENT + _LOSS, tl.load(kept_ptr + _LOSS), row)
    inside = field < _FIELDS
    updates = tl.load(total_tally_ptr)
    place = (updates % _RING) * _FIELDS
    tl.store(ring_ptr + place + field, row, mask=inside)
    tl.store(total_row_ptr + field, row, mask=inside)
    tl.store(row_ptr + field, row, mask=inside)

    stepped_count = tl.where(stepped > 0.0, 1, 0)
    skipped_count = skipped.to(tl.int64)
    tl.store(total_tally_ptr, updates + 1)
    tl.store(total_tally_ptr + 1, tl.load(total_tally_ptr + 1) + stepped_count)
    tl.store(total_tally_ptr + 2, tl.load(total_tally_ptr + 2) + skipped_count)
    tl.store(tally_ptr, tl.load(tally_ptr) + 1)
    tl.store(tally_ptr + 1, tl.load(tally_ptr + 1) + stepped_count)
    tl.store(tally_ptr + 2, tl.load(tally_ptr + 2) + skipped_count)

    tl.store(kept_ptr + _LOSS_TRACE, 0.0)
    tl.store(kept_ptr + _LOSS, float("nan"))
    tl.store(kept_ptr + _UNCALIBRATED, uncalibrated * skip)
    tl.store(kept_ptr + _GROWN, (moved > scale).to(tl.float32))
    tl.store(kept_ptr + _FLOOR_STEPS, floor_steps)
