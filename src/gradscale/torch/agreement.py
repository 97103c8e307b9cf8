"""One decision for all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def agree(facts: Sequence[Tensor], group: Any) -> tuple[Tensor, ...]:
    """Return each fact as its maximum over the ranks that must decide together.

    One small collective. Not called where gradients arrive reduced, as under DDP.

    Args:
        facts: f32[] each; NaN counts as inf, because NCCL's maximum drops NaN.
        group: The process group; None for all ranks.
    """
    sent = torch.stack(list(facts)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX, group=group)
    return sent.unbind()
