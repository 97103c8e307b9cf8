"""Saves and restores the random number generators that a training step may use."""

import random
import sys
from typing import Any

import torch


class RngState:
    """The current RNG states of torch (all devices), Python and, if loaded, NumPy.

    Syncs with devices in use.

    >>> import torch
    >>> before = RngState()
    >>> first = torch.rand(2)
    >>> before.restore()
    >>> bool((torch.rand(2) == first).all())
    True
    """

    def __init__(self) -> None:
        self._devices = [
            (module, index, module.get_rng_state(index))
            for module, index in _devices_in_use()
        ]
        self._host, self._python = torch.get_rng_state(), random.getstate()
        # Looked up, not imported: gradscale.torch does not depend on NumPy.
        self._numpy = sys.modules.get("numpy")
        self._numpy_state = self._numpy and self._numpy.random.get_state()

    def restore(self) -> None:
        """Restore the generators to these states."""
        for module, index, state in self._devices:
            module.set_rng_state(state, index)
        torch.set_rng_state(self._host)
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)


def _devices_in_use() -> list[tuple[Any, int]]:
    """Return the module and index of every accelerator in use."""
    found = []
    for module in (torch.cuda, torch.xpu):
        if module.is_available() and module.is_initialized():
            found += [(module, index) for index in range(module.device_count())]
    return found
