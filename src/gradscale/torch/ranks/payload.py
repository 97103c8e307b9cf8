"""The ten numbers that ranks exchange, and the collective that moves them."""

from typing import Any

import torch
from torch import Tensor

from gradscale.torch.device_state.layout import DeviceState
from gradscale.torch.devices import to_device
from gradscale.torch.grads.stats import RankStats

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# f64 each: the largest magnitude of each dtype, the norm, whether a loss was not
# finite, whether the rank refuses its gradients; and what must be the same on all
# ranks: the updates so far, the scale, the position.
NORM = len(DTYPES)
BAD_LOSS, REFUSES, UPDATES, SCALE, POSITION = range(NORM + 1, NORM + 6)
FIELDS = POSITION + 1


def payload_of(
    groups: list[tuple[torch.dtype, Tensor]],
    norm: Tensor | None,
    state: DeviceState,
    scale: Tensor,
    position: float,
    *,
    refuses: bool = False,
) -> Tensor:
    """Return f64[FIELDS], the payload of this rank. No host sync.

    Args:
        groups: As in `GradStats`.
        norm: f32[] or f64[], the norm of its part; None if it has none.
        state: The device state.
        scale: f32[], its scale.
        position: The number of its `RankPosition`.
        refuses: This rank cannot use its gradients, and is about to raise.
    """
    zero, one = state.zero.double(), state.one.double()
    peaks = dict.fromkeys(DTYPES, zero)
    for dtype, peak in groups:
        # One dtype may be on several devices.
        peaks[dtype] = torch.maximum(peaks[dtype], peak.double())
    payload = [
        *peaks.values(),
        zero if norm is None else norm.double(),
        (state.fields.loss_trace != 0.0).double(),
        one if refuses else zero,
        state.total.counts[0].double(),
        scale.double(),
        torch.full_like(zero, position),
    ]
    return torch.stack(payload)


def exchange(payload: Tensor, group: Any) -> Tensor:
    """Return f64[ranks, FIELDS], the payloads of all ranks. One collective."""
    mine = to_device(payload, torch.device(_carrier(payload.device.type, group)))
    ranks = torch.distributed.get_world_size(group)
    payloads = mine.new_empty(ranks * FIELDS)
    _all_gather()(payloads, mine, group=group)
    return to_device(payloads.view(ranks, FIELDS), payload.device)


def agreed_of(payloads: Tensor, order: float) -> RankStats:
    """Return the statistics of all ranks. No host sync.

    Args:
        payloads: f64[ranks, FIELDS].
        order: Of the norm.
    """
    apart = (payloads[:, UPDATES:] != payloads[:1, UPDATES:]).any()
    wide = payloads[:, :NORM].amax(0)
    # Only f64 gradients are multiplied as f64.
    peaks = (*wide.float()[:-1], wide[-1])
    return RankStats(
        groups=list(zip(DTYPES, peaks, strict=True)),
        norm=torch.linalg.vector_norm(payloads[:, NORM], order),
        bad_loss=payloads[:, BAD_LOSS].amax().float(),
        desynced=(apart | (payloads[:, REFUSES] != 0.0).any()).float(),
    )


def _all_gather() -> Any:
    # Torch 2.13 deprecates the name that 2.11 has.
    newer = getattr(torch.distributed, "all_gather_single", None)
    return torch.distributed.all_gather_into_tensor if newer is None else newer


def _carrier(device: str, group: Any) -> str:
    """Return a device type whose tensors the group can send, if possible `device`."""
    whole: Any = torch.distributed.group.WORLD if group is None else group
    able = [kind.type for kind in whole._device_types]
    # Gradients may be on the host where the only backend is NCCL.
    return device if device in able else able[0]
