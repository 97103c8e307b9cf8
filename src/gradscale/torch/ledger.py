"""What the device remembers of a run beside the policy's state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale.core.verdicts import StepRecord

# The fields of a row, in order; all f32, flags 0 or 1.
ROW = (
    "scale",
    "applied",
    "finite",
    "loss_finite",
    "norm_finite",
    "read",
    "calibrated",
    "grown",
    "floor_steps",
    "amax",
    "grad_norm",
    "refused",
)
FLAGS = ROW[1:8]


@dataclass
class Account:
    """The last row and the tally of one optimizer, or of all together.

    Attributes:
        row: f32[len(ROW)], the facts of the last step.
        tally: i64[3], updates, applied steps, skipped steps.
    """

    row: Tensor
    tally: Tensor

    def set_tally(self, applied: int, skipped: int) -> None:
        """Set the counts in place."""
        for place, count in enumerate((applied + skipped, applied, skipped)):
            self.tally[place].fill_(count)


@dataclass
class Ledger:
    """Made once, written in place: a captured graph holds these very tensors.

    Attributes:
        debt: i32[], the part of the policy's state that torch has no name for.
        used_scale: f32[], the scale that multiplied the last loss.
        loss_finite: f32[], 1 while every loss since the last update was finite.
        calibrated: f32[], 1 once a finite step was seen.
        grown: f32[], 1 if the last update raised the scale.
        floor_steps: f32[], steps in a row that were not finite at the floor.
        refused: f32[], 1 if the last scale given as a tensor was out of bounds.
        total: The account of all optimizers together.
    """

    debt: Tensor
    used_scale: Tensor
    loss_finite: Tensor
    calibrated: Tensor
    grown: Tensor
    floor_steps: Tensor
    refused: Tensor
    total: Account


def new_account(device: torch.device, applied: int = 0, skipped: int = 0) -> Account:
    """Return an account that stands at these counts."""
    account = Account(
        row=torch.zeros(len(ROW), device=device),
        tally=torch.zeros(3, dtype=torch.int64, device=device),
    )
    account.set_tally(applied, skipped)
    return account


def new_ledger(device: torch.device, scale: float, debt: int = 0) -> Ledger:
    """Return the ledger of a run that has not begun."""

    def flag(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=device)

    return Ledger(
        debt=torch.full((), debt, dtype=torch.int32, device=device),
        used_scale=flag(scale),
        loss_finite=flag(1.0),
        calibrated=flag(0.0),
        grown=flag(0.0),
        floor_steps=flag(0.0),
        refused=flag(0.0),
        total=new_account(device),
    )


def record_of(row: Sequence[float], step: int) -> StepRecord:
    """Return a row that has been read, as the record of its step."""
    facts = dict(zip(ROW, row, strict=True))
    norm = facts["grad_norm"]
    return StepRecord(
        step=step,
        scale=facts["scale"],
        floor_steps=int(facts["floor_steps"]),
        amax=facts["amax"],
        # A norm is never negative: -1 stands for "nobody asked".
        grad_norm=None if norm == -1.0 else norm,
        **{name: bool(facts[name]) for name in FLAGS},
    )
