"""GPU memory of a scaler, beside that of the optimizer.

Counts the bytes requested from the caching allocator, with the allocator's rounding of
small blocks. The unused end of large blocks is left out: it depends on earlier
allocations.
"""

import gc
from typing import Any

import torch

from benchmarks.timing import Step

# Constants of the allocator: blocks up to SMALL share pages, in multiples of GRAIN.
SMALL, GRAIN = 2**20, 512


def held(when: str = "current") -> int:
    """Return the bytes in use on the GPU: "current", or "peak" since the last reset.

    The peaks of small and large blocks may occur at different times: their sum is an
    upper bound.
    """
    stats = torch.cuda.memory_stats()
    small = stats[f"allocated_bytes.small_pool.{when}"]
    return small + stats[f"requested_bytes.large_pool.{when}"]


def footprint(size: int) -> int:
    """Return the contribution of a tensor of this many bytes to `held`."""
    return size if size > SMALL else -(-size // GRAIN) * GRAIN


def state_bytes(optimizer: Any) -> int:
    """Return the contribution of an optimizer's state to `held`, with masters."""
    # By storage: several tensors may share one.
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device.type == "cuda"
    }
    return sum(map(footprint, storages.values()))


def peak_of(step: Step) -> int:
    """Return the temporary memory of a step in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = held()
    step()
    torch.cuda.synchronize()
    return held("peak") - before


class Meter:
    """The memory of one implementation: created before it, read after warm-up."""

    def __init__(self) -> None:
        # Garbage of earlier measurements must not be freed during this one.
        gc.collect()
        self._before = held()
        self._state = 0

    def made(self, optimizer: Any) -> None:
        """Note the existing state of the optimizer, which may be shared."""
        self._state = state_bytes(optimizer)

    def read(self, step: Step, optimizer: Any, param_bytes: int) -> dict[str, float]:
        """Return the permanent and temporary memory of the scaler.

        Args:
            step: Everything after backward; called once more.
            optimizer: Stepped once more, by itself.
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
