"""One decision for all ranks."""

from typing import Any

import torch
from torch import Tensor


def agree(found: Tensor, amax: Tensor, group: Any, sharded: bool) -> tuple[
    Tensor, Tensor
]:
    """Return both facts as the maximum over the ranks that must decide together.

    The identity where gradients arrive reduced, as under DDP: without `group` and
    without DTensor gradients nothing is sent. Else one small collective.

    Args:
        found: f32[], 0 or 1.
        amax: f32[]; NaN counts as inf, because NCCL's maximum drops NaN.
        group: The process group, or None.
        sharded: Some gradient is a DTensor: without `group` all ranks take part.
    """
    if group is None and not sharded:
        return found, amax
    amax = torch.where(torch.isfinite(amax), amax, torch.inf)
    facts = torch.stack((found, amax))
    torch.distributed.all_reduce(facts, torch.distributed.ReduceOp.MAX, group=group)
    return facts[0], facts[1]
