"""What a rank says to the others: a few numbers, and one collective to move them."""

from typing import Any

import torch
from torch import Tensor

from gradscale.torch.device_state.layout import Ledger
from gradscale.torch.devices import moved
from gradscale.torch.grads.stats import Agreed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# f64 each: the largest magnitude of each dtype, the norm, whether a loss was not
# finite, whether the rank refuses its gradients; and what must be the same on all
# ranks: the updates so far, the scale, the place.
NORM = len(DTYPES)
BAD_LOSS, REFUSES, UPDATES, SCALE, PLACE = range(NORM + 1, NORM + 6)
WORDS = PLACE + 1


def say(
    groups: list[tuple[torch.dtype, Tensor]],
    norm: Tensor | None,
    ledger: Ledger,
    scale: Tensor,
    place: float,
    *,
    refuses: bool = False,
) -> Tensor:
    """Return f64[WORDS], what this rank has to say. No host sync.

    Args:
        groups: As in `Reading`.
        norm: f32[] or f64[], of its part of the whole; None if it has none.
        ledger: Where it stands.
        scale: f32[], its scale.
        place: The number of its `Place`.
        refuses: It cannot use its gradients, and is about to raise.
    """
    zero, one = ledger.zero.double(), ledger.one.double()
    peaks = dict.fromkeys(DTYPES, zero)
    for dtype, peak in groups:
        # One dtype may lie on several devices.
        peaks[dtype] = torch.maximum(peaks[dtype], peak.double())
    words = [
        *peaks.values(),
        zero if norm is None else norm.double(),
        (ledger.fields.loss_trace != 0.0).double(),
        one if refuses else zero,
        ledger.total.tally[0].double(),
        scale.double(),
        torch.full_like(zero, place),
    ]
    return torch.stack(words)


def exchange(words: Tensor, group: Any) -> Tensor:
    """Return f64[ranks, WORDS], what all ranks have said. One collective."""
    mine = moved(words, torch.device(_carrier(words.device.type, group)))
    ranks = torch.distributed.get_world_size(group)
    said = mine.new_empty(ranks * WORDS)
    _all_gather()(said, mine, group=group)
    return moved(said.view(ranks, WORDS), words.device)


def agreed_of(said: Tensor, order: float) -> Agreed:
    """Return what all that was said amounts to. No host sync.

    Args:
        said: f64[ranks, WORDS].
        order: Of the norm.
    """
    apart = (said[:, UPDATES:] != said[:1, UPDATES:]).any()
    wide = said[:, :NORM].amax(0)
    # Only f64 gradients are multiplied as f64.
    peaks = (*wide.float()[:-1], wide[-1])
    return Agreed(
        groups=list(zip(DTYPES, peaks, strict=True)),
        norm=torch.linalg.vector_norm(said[:, NORM], order),
        bad_loss=said[:, BAD_LOSS].amax().float(),
        astray=(apart | (said[:, REFUSES] != 0.0).any()).float(),
    )


def _all_gather() -> Any:
    # Torch 2.13 warns of the name that 2.11 has.
    newer = getattr(torch.distributed, "all_gather_single", None)
    return torch.distributed.all_gather_into_tensor if newer is None else newer


def _carrier(device: str, group: Any) -> str:
    """Return the type of device whose tensors the group sends, if possible `device`."""
    whole: Any = torch.distributed.group.WORLD if group is None else group
    able = [kind.type for kind in whole._device_types]
    # Gradients may lie on the host where only NCCL is there.
    return device if device in able else able[0]
