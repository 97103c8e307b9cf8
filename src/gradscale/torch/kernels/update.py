"""The end of a step of one optimizer in one launch: the rule, the rows, the counts.

Restates `DynamicScale.next_state` and the plain operations of
`gradscale.torch.device_state.update`, and is tested against both in
tests/torch/kernels/test_update.py.
All is f32: factors that are powers of two give the rule's scales bit for bit, others
are within one ulp a move.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.policies import DynamicScale
from gradscale.core.state import FixedState, ScaleState
from gradscale.judge.history import SMALLEST_NORMAL
from gradscale.torch.device_state.host_copy import Mailbox
from gradscale.torch.device_state.layout import KEPT, RING, ROW, Ledger
from gradscale.torch.device_state.letters import CALM, HIGH, LOSS, LOW, WORDS
from gradscale.torch.kernels import on
from gradscale.torch.kernels.launch import launched

if TYPE_CHECKING:
    from gradscale.torch.device_state.update import Part

# One row is all the work there is: one warp.
WARPS = 1


def settle_(
    policy: AnyPolicy,
    state: FixedState | ScaleState,
    ledger: Ledger,
    part: "Part",
    hold_on_bad_loss: bool,
    mailbox: Mailbox | None = None,
) -> None:
    """Do what `settling.settle` does for one part and no forced scale.

    In place, no host sync. All tensors are on one device.

    Args:
        policy: Its rule moves the state.
        state: The tensors that hold the state.
        ledger: What the device remembers beside it.
        part: What the optimizer contributes.
        hold_on_bad_loss: Keep the state while the loss itself is not finite.
        mailbox: Where the row goes; None to leave it on the device.
    """
    letter, known = (None, 0) if mailbox is None else mailbox.letter(ledger)
    moves = isinstance(state, ScaleState)
    growth_factor, backoff_factor, growth_interval, period = 1.0, 1.0, 1, 0
    if isinstance(policy, DynamicScale):
        growth_factor, backoff_factor = policy.growth_factor, policy.backoff_factor
        growth_interval, period = policy.growth_interval, policy.period
    device = state.scale.device
    with on(device):
        _settle(
            1,
            (
                state.scale,
                state.finite_steps if isinstance(state, ScaleState) else ledger.debt,
                ledger.debt,
                ledger.kept,
                ledger.ring,
                ledger.total.row,
                ledger.total.tally,
                part.account.row,
                part.account.tally,
                part.scale,
                part.skip,
                part.found,
                ledger.zero if part.norm_found is None else part.norm_found,
                ledger.zero if part.amax is None else part.amax,
                ledger.unasked if part.norm is None else part.norm,
                ledger.loss,
                ledger.sheet if letter is None else letter.lines,
            ),
            (
                float(part.stepped),
                float(growth_factor),
                float(backoff_factor),
                float(policy.min_scale),
                float(policy.max_scale),
                growth_interval,
                period,
                0 if letter is None else letter.number,
                known,
            ),
            MOVES=moves,
            HOLD=hold_on_bad_loss,
        )


_FIELDS = tl.constexpr(len(ROW))
_LANES = tl.constexpr(triton.next_power_of_2(WORDS))
_RING = tl.constexpr(RING)
_READ = tl.constexpr(ROW.index("read"))
_STEPPED = tl.constexpr(ROW.index("stepped"))
_SKIPPED = tl.constexpr(ROW.index("skipped"))
_SCALE = tl.constexpr(ROW.index("scale"))
_FOUND = tl.constexpr(ROW.index("found"))
_NORM_FOUND = tl.constexpr(ROW.index("norm_found"))
_AMAX = tl.constexpr(ROW.index("amax"))
_GRAD_NORM = tl.constexpr(ROW.index("grad_norm"))
# What is kept has its own vector; in a row it comes after the rest.
_KEPT = tl.constexpr(len(ROW) - len(KEPT))
_LOSS_TRACE = tl.constexpr(KEPT.index("loss_trace"))
_UNCALIBRATED = tl.constexpr(KEPT.index("uncalibrated"))
_GROWN = tl.constexpr(KEPT.index("grown"))
_FLOOR_STEPS = tl.constexpr(KEPT.index("floor_steps"))
_REFUSED = tl.constexpr(KEPT.index("refused"))
# A letter's line has the words of a row and more.
_WORDS = tl.constexpr(WORDS)
_LOSS, _LOW, _HIGH = tl.constexpr(LOSS), tl.constexpr(LOW), tl.constexpr(HIGH)
_CALM = tl.constexpr(CALM)
_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)


# Each product is rounded, as by the rule; Triton's default is in flux.
@launched(num_warps=WARPS, enable_fp_fusion=False)
def _settle(
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
    found_ptr,
    norm_found_ptr,
    amax_ptr,
    norm_ptr,
    loss_ptr,
    letter_ptr,
    stepped,
    growth_factor,
    backoff_factor,
    min_scale,
    max_scale,
    growth_interval,
    period,
    number,
    known,
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
        raised = tl.where(due, scale * growth_factor, scale)
        shrunk = tl.where(forgiven, scale, scale * backoff_factor)
        moved = tl.where(finite, raised, shrunk)
        # A product that overflows is inf, which is above every max_scale.
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
    found = tl.load(found_ptr).to(tl.float32)
    norm_found = tl.load(norm_found_ptr).to(tl.float32)
    amax = tl.load(amax_ptr).to(tl.float32)
    row = tl.where(field == _FOUND, found, row)
    row = tl.where(field == _NORM_FOUND, norm_found, row)
    row = tl.where(field == _AMAX, amax, row)
    row = tl.where(field == _GRAD_NORM, tl.load(norm_ptr).to(tl.float32), row)
    row = tl.where(field == _KEPT + _LOSS_TRACE, loss_trace, row)
    row = tl.where(field == _KEPT + _UNCALIBRATED, uncalibrated, row)
    row = tl.where(field == _KEPT + _GROWN, grown, row)
    row = tl.where(field == _KEPT + _FLOOR_STEPS, floor_steps, row)
    row = tl.where(field == _KEPT + _REFUSED, refused, row)
    inside = field < _FIELDS
    updates = tl.load(total_tally_ptr)
    if number > 0:
        # Steps that the host has not heard of: a graph was replayed.
        early = tl.maximum(known, updates + 1 - _RING)
        while early < updates:
            place = early % _RING
            line = tl.load(ring_ptr + place * _FIELDS + field, mask=inside, other=0.0)
            _post(letter_ptr, 1 + place, field, line.to(tl.int32, bitcast=True), number)
            early += 1
        line = tl.where(field == _LOSS, tl.load(loss_ptr), row)
        words = line.to(tl.int32, bitcast=True)
        # As `ledger.calm` has it, and the host has heard of all before.
        bad = (skipped != 0.0) | (found != 0.0) | (norm_found != 0.0)
        bad |= (loss_trace != 0.0) | (floor_steps != 0.0) | (refused != 0.0)
        calm = (bad == 0) & (amax >= _SMALLEST_NORMAL) & (known >= updates)
        high = (updates + 1) >> 32
        high = tl.where(calm, high | _CALM, high)
        words = tl.where(field == _LOW, (updates + 1).to(tl.int32), words)
        words = tl.where(field == _HIGH, high.to(tl.int32), words)
        _post(letter_ptr, 0, field, words, number)
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
    tl.store(kept_ptr + _UNCALIBRATED, uncalibrated * skip)
    tl.store(kept_ptr + _GROWN, (moved > scale).to(tl.float32))
    tl.store(kept_ptr + _FLOOR_STEPS, floor_steps)


@triton.jit
def _post(letter_ptr, line, field, values, number):
    # Each word bears the number of its letter: see `letters`.
    words = (number.to(tl.int64) << 32) | (values.to(tl.int64) & 0xFFFFFFFF)
    at_ptr = letter_ptr + line * _WORDS + field
    # Through the cache: the host does not see what is in it.
    tl.store(at_ptr, words, mask=field < _WORDS, cache_modifier=".wt")
