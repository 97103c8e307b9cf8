"""The state kept for each optimizer from step to step."""

import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from gradscale.torch.device_state.layout import StepTotals, new_totals
from gradscale.torch.kernels import Kernels
from gradscale.torch.kernels.grad_reader import GradReader
from gradscale.torch.kernels.torch_fused_adam import StandIn


@dataclass
class OptimizerEntry:
    """The state of one optimizer.

    Attributes:
        reader: Reads its gradients by kernels.
        stand_in: Steps it instead of torch's fused kernel, where it can.
        totals: Its counts and last row; None before the first loss.
        optimizer: A weak reference to it; None if only its id is known.
        checked: The dtypes of its parameters were checked before its first step.
    """

    reader: GradReader
    stand_in: StandIn
    totals: StepTotals | None = None
    optimizer: weakref.ref[Any] | None = None
    checked: bool = False


class OptimizerEntries:
    """The entries of all optimizers, by id, in the order of their first step.

    Args:
        kernels: As for the scaler.
        forget: Called with the id of an optimizer that was deleted, and its groups.
    """

    def __init__(self, kernels: Kernels, forget: Callable[[int, Any], object]) -> None:
        self._kernels = kernels
        self._forget = forget
        self._entries: dict[int, OptimizerEntry] = {}
        self._device: torch.device | None = None
        self._counts: Sequence[tuple[int, int]] = ()

    def start(self, device: torch.device, counts: Sequence[tuple[int, int]]) -> None:
        """Count the steps of every optimizer from now on.

        Args:
            device: The device of the counts.
            counts: (applied, skipped) of each optimizer of a resumed run, in order.
        """
        self._device, self._counts = device, counts
        for place, each in enumerate(self.totals().values()):
            each.set_counts(*self._counts_at(place))

    def of(self, optimizer: Any) -> OptimizerEntry:
        """Return the entry of an optimizer; made with its first step."""
        key = id(optimizer)
        entry = self._entries.get(key)
        if entry is not None and entry.totals is not None:
            return entry
        if entry is not None:
            return self.at(key)
        entry = self.at(key)
        # The key is an address: it is free once the optimizer is deleted. One with
        # __slots__ cannot be watched; its entry stays.
        with suppress(TypeError):
            entry.optimizer = weakref.ref(optimizer)
            # Its groups are needed to name its parameters when it is deleted.
            weakref.finalize(optimizer, self._drop, key, optimizer.param_groups)
        return entry

    def at(self, key: int) -> OptimizerEntry:
        """Return the entry of an optimizer of which only the id is known."""
        entry = self._entries.get(key)
        if entry is None:
            entry = OptimizerEntry(GradReader(self._kernels), StandIn(self._kernels))
            self._entries[key] = entry
        if entry.totals is None and self._device is not None:
            counts = self._counts_at(len(self.totals()))
            entry.totals = new_totals(self._device, *counts)
        return entry

    def totals_of(self, key: int) -> StepTotals:
        """Return the totals of an optimizer. After `start`."""
        totals = self.at(key).totals
        assert totals is not None
        return totals

    def totals(self) -> dict[int, StepTotals]:
        """Return the totals by id."""
        return {
            key: entry.totals
            for key, entry in self._entries.items()
            if entry.totals is not None
        }

    def others(self, keys: Container[int]) -> list[Any]:
        """Return the optimizers whose ids are not among these."""
        refs = [e.optimizer for key, e in self._entries.items() if key not in keys]
        return [there for ref in refs if ref and (there := ref()) is not None]

    def params(self) -> list[Any]:
        """Return the parameters of all optimizers."""
        groups = [group for each in self.others(()) for group in each.param_groups]
        return [param for group in groups for param in group["params"]]

    def position(self, key: int) -> int:
        """Return the position of an optimizer, the same on all ranks; -1 if unknown."""
        keys = list(self._entries)
        return keys.index(key) if key in self._entries else -1

    def _counts_at(self, place: int) -> tuple[int, int]:
        return self._counts[place] if place < len(self._counts) else (0, 0)

    def _drop(self, key: int, param_groups: list[dict[str, Any]]) -> None:
        self._entries.pop(key, None)
        self._forget(key, param_groups)
