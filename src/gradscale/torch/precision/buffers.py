"""Restores the buffers of a model after a skipped step."""

import torch
from torch import Tensor, nn


class BufferGuard:
    """Copies of a model's buffers, such as the running statistics of BatchNorm.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: dict[str, Tensor] = {}
        self._save()

    def _save(self) -> None:
        for name, buffer in self._model.named_buffers():
            saved = self._saved.get(name)
            if saved is None or _differ(saved, buffer):
                self._saved[name] = buffer.detach().clone()
            else:
                saved.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back."""
        for name, buffer in self._model.named_buffers():
            if name in self._saved and not _differ(self._saved[name], buffer):
                buffer.copy_(self._saved[name])

    @torch.no_grad()
    def end_update(self, skipped: Tensor) -> None:
        """Restore the buffers if the step was skipped, then copy them again.

        No host sync.

        Args:
            skipped: f32[], 1 if the step was skipped, else 0.
        """
        flags: dict[torch.device, Tensor] = {}
        for name, buffer in self._model.named_buffers():
            saved = self._saved.get(name)
            if saved is not None and not _differ(saved, buffer):
                flag = flags.setdefault(buffer.device, skipped.to(buffer.device) == 1.0)
                buffer.copy_(torch.where(flag, saved, buffer))
        self._save()


def _differ(saved: Tensor, buffer: Tensor) -> bool:
    """Return whether a buffer was replaced by one of another shape, dtype or device."""
    return (saved.shape, saved.dtype, saved.device) != (
        buffer.shape,
        buffer.dtype,
        buffer.device,
    )
