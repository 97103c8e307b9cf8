"""Which tensors were not finite in a step, on the way to the host."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.names import names_of
from gradscale.torch.open_step import OpenStep


class _Copy(NamedTuple):
    """Flags on their way.

    Attributes:
        flags: bool[n] in host memory, 1 for a tensor that was not finite.
        arrived: Recorded after the copy; None if they are there.
        params: The parameters behind them.
        step: Whose they are.
    """

    flags: Tensor
    arrived: torch.cuda.Event | None
    params: list[Tensor]
    step: OpenStep


class Notice:
    """The culprits of one step. Starting it costs no host sync; reading may wait.

    Args:
        steps: What each optimizer has done, as the update left it.
    """

    def __init__(self, steps: Iterable[OpenStep]) -> None:
        self._copies = [copy for step in steps for copy in _copies_of(step)]

    @property
    def on_its_way(self) -> bool:
        """Whether something is not on the host yet."""
        return any(copy.arrived is not None for copy in self._copies)

    def names(self) -> list[str]:
        """Return the culprits in the order of their optimizers."""
        found = []
        for copy in self._copies:
            if copy.arrived is not None:
                copy.arrived.synchronize()
            flags = copy.flags.tolist()
            bad = [p for p, flag in zip(copy.params, flags, strict=True) if flag]
            found += names_of(bad, copy.step.names) if bad else []
        return found


def _copies_of(step: OpenStep) -> list[_Copy]:
    reading, multiplier = step.reading, step.multiplier
    if reading is None or multiplier is None:
        return []
    copies = []
    for params, flags in reading.flags(multiplier):
        if flags.device.type != "cuda":
            copies.append(_Copy(flags.cpu(), None, params, step))
            continue
        here = torch.empty(len(params), dtype=torch.bool, device="cpu", pin_memory=True)
        here.copy_(flags, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(flags.device))
        copies.append(_Copy(here, arrived, params, step))
    return copies
