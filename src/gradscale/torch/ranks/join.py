"""Supports ranks that run out of data before the others."""

from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from gradscale.errors import ConfigError


class ScalerJoinHook(JoinHook):
    """Gives every rank the scale of the rank that trained longest.

    A rank without data takes no more steps, so its scale becomes outdated. In the end
    the model is that of the last rank, and so must be the scale: ranks with different
    scales would average gradients of different scales.

    Until then replicas do not exchange whether their losses were finite: ranks without
    data would not take part.

    Args:
        scaler: The scaler of this rank.
        group: The ranks.

    Raises:
        ConfigError: The ranks of this scaler exchange statistics in every step, in
            which a rank without data would not take part.
    """

    def __init__(self, scaler: Any, group: Any) -> None:
        if scaler._ranks.always_exchange:
            raise ConfigError(
                f"Join was given a {type(scaler).__name__} whose ranks decide together "
                "in every step. A rank that has run out of data takes no part, and the "
                "others would wait for it. Under DDP leave process_group out, for "
                "gradients arrive reduced; elsewhere give all ranks equally many "
                "batches.",
                code="GS111",
            )
        self._scaler = scaler
        self._group = group
        scaler._ranks.detached = True

    def post_hook(self, is_last_joiner: bool) -> None:
        """Load the state of one of the last ranks."""
        rank = torch.distributed.get_rank() if is_last_joiner else -1
        last_joiners: list[int] = [rank] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(last_joiners, rank, group=self._group)
        last = max(last_joiners)
        state = [self._scaler.state_dict() if rank == last else None]
        torch.distributed.broadcast_object_list(state, src=last, group=self._group)
        # On all ranks: pending copies to the host are dropped by all or by none.
        self._scaler.load_state_dict(state[0])
        self._scaler._ranks.detached = False
