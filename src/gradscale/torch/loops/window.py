"""Accumulation windows: the gradients of several micro-batches."""

from typing import Any

import torch

from gradscale.torch.ranks.sharding import replicas_of
from gradscale.torch.scaler import GradScaler


def grads_finite(scaler: GradScaler, optimizer: Any) -> bool:
    """Return whether the gradients accumulated so far are finite. Syncs.

    For a window of micro-batches: after an overflow the rest of the window need not be
    computed. Reads the gradients once and writes nothing; `step` and `update` are still
    required at the end of the window. Under DDP's `no_sync`, all ranks get the same
    result if the scaler has the wrapped model.

    >>> import torch
    >>> from gradscale.torch import GradScaler
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> scaler = GradScaler("cpu")
    >>> for factor in (1.0, float("inf"), 1.0):
    ...     scaler.scale((weight * factor).sum()).backward()
    ...     if not grads_finite(scaler, optimizer):
    ...         break
    >>> factor
    inf

    Args:
        scaler: Its scale has multiplied the losses.
        optimizer: Its gradients are read.
    """
    if not scaler.is_enabled():
        return True
    step = scaler._open(optimizer, "grads_finite")
    step.collect(allow_fp16=True)
    scale = scaler._scale_of_grads(step)
    step.read(scale)
    # Of the gradients so far: more may be added before the step is decided.
    step.decision = None
    nonfinite = torch.zeros_like(scale)
    if step.stats is not None:
        nonfinite = step.stats.nonfinite(scale.reciprocal())
    return not any_rank(bool(nonfinite.item()), replicas_of(scaler._model))


def any_rank(flag: bool, group: Any) -> bool:
    """Return whether a flag is set on any rank of a group; None for one alone."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return flag
    # Objects: the group's backend decides which device a tensor would have to be on.
    flags: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(flags, flag, group=group)
    return any(flags)
