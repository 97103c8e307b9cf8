"""A tensor on its way to the host."""

import torch
from torch import Tensor


class Late:
    """A tensor whose copy to the host starts at once. No host sync."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            landing = torch.empty_like(tensor, device="cpu", pin_memory=True)
            landing.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))
            self._values = landing
        else:
            # It may be written in place; on other devices the read itself waits.
            self._values = tensor.clone()

    @property
    def on_its_way(self) -> bool:
        """Whether the host may have to wait for it; the same on every rank."""
        return self._arrived is not None

    def values(self) -> Tensor:
        """Return the values, on the host. Waits for them alone."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        return self._values.cpu()
