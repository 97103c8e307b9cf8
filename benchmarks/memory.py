"""What a scaler needs of a GPU's memory, beside the optimizer that it serves.

Counted is what the caching allocator was asked for, and each small block as it rounds
it up: what it leaves unused at the end of large blocks depends on what ran before.
"""

import gc
from typing import Any

import torch

from benchmarks.timing import Step

# The allocator's: blocks up to this size share pages, in steps of the other.
SMALL, GRAIN = 2**20, 512


def held(when: str = "current") -> int:
    """Return the bytes in use on the GPU: "current", or "peak" since the last reset.

    The peaks of small and large blocks may be at two times: their sum is a bound.
    """
    stats = torch.cuda.memory_stats()
    small = stats[f"allocated_bytes.small_pool.{when}"]
    return small + stats[f"requested_bytes.large_pool.{when}"]


def footprint(size: int) -> int:
    """Return what a tensor of this many bytes adds to `held`."""
    return size if size > SMALL else -(-size // GRAIN) * GRAIN


def state_bytes(optimizer: Any) -> int:
    """Return what the state of an optimizer adds to `held`, masters included."""
    # By storage: several tensors may be parts of one.
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device.type == "cuda"
    }
    return sum(map(footprint, storages.values()))


def peak_of(step: Step) -> int:
    """Return how many bytes a step needs for a while, and gives back."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = held()
    step()
    torch.cuda.synchronize()
    return held("peak") - before


class Meter:
    """The memory of one contestant: made before it is, read once it is warm."""

    def __init__(self) -> None:
        # What the last one left behind must not be freed while this one is measured.
        gc.collect()
        self._before = held()
        self._state = 0

    def made(self, optimizer: Any) -> None:
        """Note what state the optimizer has already: another contestant's too."""
        self._state = state_bytes(optimizer)

    def read(self, step: Step, optimizer: Any, param_bytes: int) -> dict[str, float]:
        """Return what the scaler keeps and what its step needs for a while.

        Args:
            step: The contestant's; taken once more.
            optimizer: Its optimizer; stepped once more, by itself.
            param_bytes: Of all parameters, for the share.
        """
        new_state = state_bytes(optimizer) - self._state
        kept = held() - self._before - new_state
        peak = max(0, peak_of(step) - peak_of(optimizer.step))
        return {
            "kept_bytes": kept,
            "peak_bytes": peak,
            "memory_share": (kept + peak) / param_bytes,
        }
