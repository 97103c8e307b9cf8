"""What the device remembers of a run beside the policy's state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale.core.verdicts import StepRecord

# The fields of a row, in order; all f32. Flags are 0 where all is well, so that they
# can be written as they come; `record_of` turns them round.
ROW = (
    "scale",
    "stepped",
    "skipped",
    "found",
    "loss_trace",
    "norm_found",
    "read",
    "uncalibrated",
    "grown",
    "floor_steps",
    "amax",
    "grad_norm",
    "refused",
)


@dataclass
class Account:
    """The last row and the tally of one optimizer, or of all together.

    Attributes:
        row: f32[len(ROW)], the facts of the last step.
        tally: i64[3], updates, steps asked for, steps skipped.
    """

    row: Tensor
    tally: Tensor

    def set_tally(self, applied: int, skipped: int) -> None:
        """Set the counts in place."""
        for place, count in enumerate((applied + skipped, applied + skipped, skipped)):
            self.tally[place].fill_(count)

    def counts(self) -> tuple[int, int]:
        """Return how many steps were applied and how many skipped. Syncs."""
        _, stepped, skipped = self.tally.tolist()
        return stepped - skipped, skipped


@dataclass
class Ledger:
    """Made once, written in place: a captured graph holds these very tensors.

    Attributes:
        debt: i32[], the part of the policy's state that torch has no name for.
        used_scale: f32[], the scale that multiplied the last loss.
        loss_trace: f32[], 0 while every loss since the last update was finite, then
            NaN.
        uncalibrated: f32[], 0 once a finite step was seen.
        grown: f32[], 1 if the last update raised the scale.
        floor_steps: f32[], steps in a row that were not finite at the floor.
        refused: f32[], 1 if the last scale given as a tensor was out of bounds.
        total: The account of all optimizers together.
        zero, one, unasked: f32[], 0, 1 and -1, never written.
    """

    debt: Tensor
    used_scale: Tensor
    loss_trace: Tensor
    uncalibrated: Tensor
    grown: Tensor
    floor_steps: Tensor
    refused: Tensor
    total: Account
    zero: Tensor
    one: Tensor
    unasked: Tensor


def new_account(device: torch.device, applied: int = 0, skipped: int = 0) -> Account:
    """Return an account that stands at these counts."""
    account = Account(
        row=torch.zeros(len(ROW), device=device),
        tally=torch.zeros(3, dtype=torch.int64, device=device),
    )
    account.set_tally(applied, skipped)
    return account


def new_ledger(device: torch.device, scale: float) -> Ledger:
    """Return the ledger of a run that has not begun."""

    def number(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=device)

    return Ledger(
        debt=torch.zeros((), dtype=torch.int32, device=device),
        used_scale=number(scale),
        loss_trace=number(0.0),
        uncalibrated=number(1.0),
        grown=number(0.0),
        floor_steps=number(0.0),
        refused=number(0.0),
        total=new_account(device),
        zero=number(0.0),
        one=number(1.0),
        unasked=number(-1.0),
    )


def record_of(row: Sequence[float], step: int) -> StepRecord:
    """Return a row that has been read, as the record of its step."""
    facts = dict(zip(ROW, row, strict=True))
    norm = facts["grad_norm"]
    return StepRecord(
        step=step,
        scale=facts["scale"],
        applied=facts["stepped"] == 1.0 and facts["skipped"] == 0.0,
        finite=facts["found"] == 0.0,
        loss_finite=facts["loss_trace"] == 0.0,
        norm_finite=facts["norm_found"] == 0.0,
        read=facts["read"] == 1.0,
        calibrated=facts["uncalibrated"] == 0.0,
        grown=facts["grown"] == 1.0,
        floor_steps=int(facts["floor_steps"]),
        amax=facts["amax"],
        # A norm is never negative: -1 says that nobody asked.
        grad_norm=None if norm == -1.0 else norm,
    )
