"""What the device remembers of a run beside the policy's state."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.core.records import StepRecord, Verdict
from gradscale.judge.history import SMALLEST_NORMAL


class Kept(NamedTuple):
    """What the device keeps from step to step; f32[] each.

    Attributes:
        loss_trace: 0 while every loss since the last update was finite, then NaN.
        uncalibrated: 0 once a finite step was seen.
        grown: 1 if the last update raised the scale.
        floor_steps: Steps in a row that were not finite at the floor.
        refused: 1 if the last scale given as a tensor was out of bounds.
    """

    loss_trace: Tensor
    uncalibrated: Tensor
    grown: Tensor
    floor_steps: Tensor
    refused: Tensor


class Facts(NamedTuple):
    """What one step adds to them; f32[] each.

    Flags are 0 where all is well, so that they can be written as they come;
    `record_of` turns them round. The first three are what a tally counts.

    Attributes:
        read: 1 if some gradient was read.
        stepped: 1 if a step was asked for.
        skipped: 1 if it was to be skipped.
        scale: The scale that multiplied the loss.
        found: 1 if an element was not finite.
        norm_found: 1 if the norm was not usable.
        amax: The largest scaled magnitude.
        grad_norm: The norm of the unscaled gradients; -1 if nobody asked.
    """

    read: Tensor
    stepped: Tensor
    skipped: Tensor
    scale: Tensor
    found: Tensor
    norm_found: Tensor
    amax: Tensor
    grad_norm: Tensor


KEPT = Kept._fields
# The fields of a row, in order.
ROW = (*Facts._fields, *KEPT)
# Steps that a graph may replay before the host looks again; 3 KiB of rows.
RING = 64
# Of a sheet, in i64: the tally and the loss, so that the ring begins at 16 bytes.
_HEAD = 4
# The name of an enum's value takes longer than all the rest of a row.
_OK = Verdict.OK.value
CalmRow = tuple[float, bool, str, float | None, float]
_Row = ctypes.c_float * len(ROW)


@dataclass
class Account:
    """The last row and the tally of one optimizer, or of all together.

    Attributes:
        row: f32[len(ROW)], the facts of the last step.
        tally: i64[3], updates, steps asked for, steps skipped.
        start: The updates that the tally was last set to, on the host.
        starts: How often it was set.
    """

    row: Tensor
    tally: Tensor
    start: int = 0
    starts: int = 0

    def set_tally(self, applied: int, skipped: int) -> None:
        """Set the counts in place."""
        self.start, self.starts = applied + skipped, self.starts + 1
        for place, count in enumerate((applied + skipped, applied + skipped, skipped)):
            self.tally[place].fill_(count)

    def counts(self) -> tuple[int, int]:
        """Return how many steps were applied and how many skipped. Syncs."""
        _, stepped, skipped = self.tally.tolist()
        return stepped - skipped, skipped


@dataclass
class Draft:
    """A row while it is written, and what it is compared with.

    Attributes:
        sheet: f32[len(ROW) + 1], all of it: one operation writes it.
        row, line, flags, before: Views of it, made once: the row, the row as
            f32[1, len(ROW)], its first three, and f32[], the scale before the update.
    """

    sheet: Tensor

    def __post_init__(self) -> None:
        self.row, self.before = self.sheet[:-1], self.sheet[-1]
        self.line, self.flags = self.row.unsqueeze(0), self.row[:3]


@dataclass
class Ledger:
    """Made once, written in place: a captured graph holds these very tensors.

    Attributes:
        debt: i32[], the part of the policy's state that torch has no name for.
        used_scale: f32[], the scale that multiplied the last loss.
        kept: f32[len(KEPT)], the fields of `Kept`.
        fields: Views of it, made once: a view takes the host as long as a sum.
        total: The account of all optimizers together.
        draft: The row of the next update, by plain operations.
        ring: f32[RING, len(ROW)], its last rows: that of step s at (s - 1) % RING.
        loss: f32[], the sum of the losses of one element since the last update.
        sheet: i64[...], the tally of the total, the loss and the ring in one piece, for
            one copy to carry them; `on_sheet` finds them.
        zero, one, unasked: f32[], 0, 1 and -1, never written.
    """

    debt: Tensor
    used_scale: Tensor
    kept: Tensor
    fields: Kept
    total: Account
    draft: Draft
    ring: Tensor
    loss: Tensor
    sheet: Tensor
    zero: Tensor
    one: Tensor
    unasked: Tensor


def _zeros(count: int, device: torch.device) -> Tensor:
    # Somebody may have set another dtype as torch's default.
    return torch.zeros(count, dtype=torch.float32, device=device)


def new_account(device: torch.device, applied: int = 0, skipped: int = 0) -> Account:
    """Return an account that stands at these counts."""
    account = Account(
        row=_zeros(len(ROW), device),
        tally=torch.zeros(3, dtype=torch.int64, device=device),
    )
    account.set_tally(applied, skipped)
    return account


def on_sheet(sheet: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tally and the ring of a sheet, or of a copy of one: views of it."""
    ring = sheet[_HEAD:].view(torch.float32).view(RING, len(ROW))
    return sheet[:3], ring


def updates_at(address: int) -> int:
    """Return the updates of a sheet in host memory: a load, no operator runs."""
    return ctypes.c_int64.from_address(address).value


def loss_at(address: int) -> float:
    """Return the loss of a sheet in host memory: a load, no operator runs."""
    return ctypes.c_float.from_address(address + (_HEAD - 1) * 8).value


def row_at(address: int, place: int) -> list[float]:
    """Return one row of a sheet in host memory: a load, no operator runs."""
    begin = address + _HEAD * 8 + place * ctypes.sizeof(_Row)
    return list(_Row.from_address(begin))


def new_ledger(device: torch.device, scale: float) -> Ledger:
    """Return the ledger of a run that has not begun."""

    def number(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=device)

    sheet = torch.zeros(_HEAD + RING * len(ROW) // 2, dtype=torch.int64, device=device)
    tally, ring = on_sheet(sheet)
    kept = _zeros(len(KEPT), device)
    ledger = Ledger(
        debt=torch.zeros((), dtype=torch.int32, device=device),
        used_scale=number(scale),
        kept=kept,
        fields=Kept(*(kept[place] for place in range(len(KEPT)))),
        total=Account(row=_zeros(len(ROW), device), tally=tally),
        draft=Draft(_zeros(len(ROW) + 1, device)),
        ring=ring,
        loss=sheet.view(torch.float32)[2 * (_HEAD - 1)],
        sheet=sheet,
        zero=number(0.0),
        one=number(1.0),
        unasked=number(-1.0),
    )
    ledger.fields.uncalibrated.fill_(1.0)
    return ledger


def record_of(row: Sequence[float], step: int, loss: float | None = None) -> StepRecord:
    """Return a row that has been read, as the record of its step."""
    # In the order of `ROW`: this is done in every step.
    read, stepped, skipped, scale, found, norm_found, amax, norm, *kept = row
    loss_trace, uncalibrated, grown, floor_steps, _ = kept
    return StepRecord(
        step=step,
        scale=scale,
        applied=stepped == 1.0 and skipped == 0.0,
        finite=found == 0.0,
        loss_finite=loss_trace == 0.0,
        norm_finite=norm_found == 0.0,
        read=read == 1.0,
        calibrated=uncalibrated == 0.0,
        grown=grown == 1.0,
        floor_steps=int(floor_steps),
        amax=amax,
        # A norm is never negative: -1 says that nobody asked.
        grad_norm=None if norm == -1.0 else norm,
        loss=loss,
    )


def calm(row: Sequence[float]) -> CalmRow | None:
    """Return what is written down of a step in which nothing happened.

    Such a step is ok, whatever was before it.

    >>> ledger = new_ledger(torch.device("cpu"), 8.0)
    >>> calm(ledger.total.row.tolist())

    Returns:
        Scale, applied, verdict, norm and largest magnitude; None for other steps.
    """
    read, stepped, skipped, scale, found, norm_found, amax, norm, *kept = row
    trace, _, _, floor, refused = kept
    if skipped == found == norm_found == trace == floor == refused == 0.0 and (
        read == 1.0 and amax >= SMALLEST_NORMAL
    ):
        return scale, stepped == 1.0, _OK, None if norm == -1.0 else norm, amax
    return None
