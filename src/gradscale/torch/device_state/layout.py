"""The device tensors that persist between steps, besides the policy's state.

Made once and written in place: a captured CUDA graph holds these very tensors.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.core.records import StepRecord


class Persistent(NamedTuple):
    """Values that persist from step to step; f32[] each on the device.

    Attributes:
        loss_trace: 0 while every loss since the last update was finite, then NaN.
        uncalibrated: 0 once a finite step was seen.
        grown: 1 if the last update raised the scale.
        floor_steps: Steps in a row that were not finite at the lowest scale.
        refused: 1 if the last scale given as a tensor was out of bounds.
        loss: The sum of the scalar losses since the last update; NaN without any.
    """

    loss_trace: Tensor
    uncalibrated: Tensor
    grown: Tensor
    floor_steps: Tensor
    refused: Tensor
    loss: Tensor


class StepFacts(NamedTuple):
    """The fields of a row that one step adds; f32[] each on the device.

    `skipped`, `nonfinite` and `norm_unusable` are 0 in a healthy step. The first
    three fields are counted.

    Attributes:
        read: 1 if some gradient was read.
        stepped: 1 if a step was requested.
        skipped: 1 if it was to be skipped.
        scale: The scale that multiplied the loss.
        nonfinite: 1 if an element was not finite.
        norm_unusable: 1 if the norm was not usable.
        amax: The largest scaled magnitude.
        grad_norm: The norm of the unscaled gradients; -1 if it was not computed.
    """

    read: Tensor
    stepped: Tensor
    skipped: Tensor
    scale: Tensor
    nonfinite: Tensor
    norm_unusable: Tensor
    amax: Tensor
    grad_norm: Tensor


PERSISTENT = Persistent._fields
# The fields of a row, in order.
ROW = (*StepFacts._fields, *PERSISTENT)
# Rows on the device: steps that a graph may replay between two copies; 3.5 KiB.
RING = 64
# i64 before the ring in `DeviceState.packed`: the counts, and one that aligns the ring.
HEAD = 4


class DeviceRow(NamedTuple):
    """A row on the host: the fields of `ROW`, by name."""

    read: float
    stepped: float
    skipped: float
    scale: float
    nonfinite: float
    norm_unusable: float
    amax: float
    grad_norm: float
    loss_trace: float
    uncalibrated: float
    grown: float
    floor_steps: float
    refused: float
    loss: float

    def record(self, step: int) -> StepRecord:
        """Return the record of this step."""
        # Without a loss the sum is NaN; a loss that is NaN leaves a trace.
        known = self.loss_trace != 0.0 or not math.isnan(self.loss)
        return StepRecord(
            step=step,
            scale=self.scale,
            applied=self.stepped == 1.0 and self.skipped == 0.0,
            finite=self.nonfinite == 0.0,
            loss_finite=self.loss_trace == 0.0,
            norm_finite=self.norm_unusable == 0.0,
            read=self.read == 1.0,
            calibrated=self.uncalibrated == 0.0,
            grown=self.grown == 1.0,
            floor_steps=int(self.floor_steps),
            amax=self.amax,
            grad_norm=None if self.grad_norm == -1.0 else self.grad_norm,
            loss=self.loss if known else None,
        )


assert DeviceRow._fields == ROW


@dataclass
class StepTotals:
    """The last row and the counts of one optimizer, or of all together.

    Attributes:
        row: f32[len(ROW)], the row of the last step.
        counts: i64[3], updates, steps requested, steps skipped.
        start: The number of updates to which the counts were last set, on the host.
        starts: How often the counts were set.
    """

    row: Tensor
    counts: Tensor
    start: int = 0
    starts: int = 0

    def set_counts(self, applied: int, skipped: int) -> None:
        """Set the counts in place."""
        self.start, self.starts = applied + skipped, self.starts + 1
        for place, count in enumerate((applied + skipped, applied + skipped, skipped)):
            self.counts[place].fill_(count)

    def applied_and_skipped(self) -> tuple[int, int]:
        """Return the numbers of applied and of skipped steps. Syncs."""
        _, stepped, skipped = self.counts.tolist()
        return stepped - skipped, skipped


@dataclass
class DeviceState:
    """The state of a scaler on one device, besides the policy's.

    Attributes:
        debt: i32[], `ScaleState.debt`; torch's GradScaler has no equivalent.
        used_scale: f32[], the scale that multiplied the last loss.
        persistent: f32[len(PERSISTENT)], the fields of `Persistent`.
        fields: Views of `persistent`, made once: one takes as long as an operation.
        total: The totals of all optimizers together.
        ring: f32[RING, len(ROW)], the last rows: that of step s at (s - 1) % RING.
        packed: i64[HEAD + ...], the counts of the total and the ring in one piece, so
            that one copy carries both to the host.
        zero, one, unasked, nan: f32[], 0, 1, -1 and NaN, never written.
    """

    debt: Tensor
    used_scale: Tensor
    persistent: Tensor
    fields: Persistent
    total: StepTotals
    ring: Tensor
    packed: Tensor
    zero: Tensor
    one: Tensor
    unasked: Tensor
    nan: Tensor


def new_totals(device: torch.device, applied: int = 0, skipped: int = 0) -> StepTotals:
    """Return totals with these counts."""
    totals = StepTotals(
        row=_zeros(len(ROW), device),
        counts=torch.zeros(3, dtype=torch.int64, device=device),
    )
    totals.set_counts(applied, skipped)
    return totals


def new_device_state(device: torch.device, scale: float) -> DeviceState:
    """Return the initial state of a run."""

    def number(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=device)

    packed = torch.zeros(HEAD + RING * len(ROW) // 2, dtype=torch.int64, device=device)
    counts, ring = split_packed(packed)
    persistent = _zeros(len(PERSISTENT), device)
    state = DeviceState(
        debt=torch.zeros((), dtype=torch.int32, device=device),
        used_scale=number(scale),
        persistent=persistent,
        fields=Persistent(*(persistent[place] for place in range(len(PERSISTENT)))),
        total=StepTotals(row=_zeros(len(ROW), device), counts=counts),
        ring=ring,
        packed=packed,
        zero=number(0.0),
        one=number(1.0),
        unasked=number(-1.0),
        nan=number(math.nan),
    )
    state.fields.uncalibrated.fill_(1.0)
    state.fields.loss.fill_(math.nan)
    return state


def split_packed(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the counts and of the ring."""
    ring = packed[HEAD:].view(torch.float32).view(RING, len(ROW))
    return packed[:3], ring


def _zeros(count: int, device: torch.device) -> Tensor:
    # Explicitly f32: torch's default dtype may be another.
    return torch.zeros(count, dtype=torch.float32, device=device)
