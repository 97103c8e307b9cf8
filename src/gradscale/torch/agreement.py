"""One decision for all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def agree(facts: Sequence[Tensor], group: Any, sharded: bool) -> tuple[Tensor, ...]:
    """Return each fact as its maximum over the ranks that must decide together.

    The identity where gradients arrive reduced, as under DDP: without `group` and
    without DTensor gradients nothing is sent. Else one small collective.

    Args:
        facts: f32[] each; NaN counts as inf, because NCCL's maximum drops NaN.
        group: The process group, or None.
        sharded: Some parameter is a DTensor: without `group` all ranks take part.
    """
    if group is None and not sharded:
        return tuple(facts)
    sent = torch.stack(list(facts)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX, group=group)
    return sent.unbind()
