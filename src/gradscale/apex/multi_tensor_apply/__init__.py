"""apex.multi_tensor_apply: one call for lists of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls an operation of `amp_C` with lists of tensors.

    >>> import torch
    >>> from gradscale.apex import amp_C
    >>> overflow, grads = torch.zeros(1, dtype=torch.int), [torch.ones(2)]
    >>> applier = MultiTensorApply(2048 * 32)
    >>> applier(amp_C.multi_tensor_scale, overflow, [grads, grads], 0.5)
    >>> grads, overflow.item()
    ([tensor([0.5000, 0.5000])], 0)

    Args:
        chunk_size: Passed on; torch chooses its own.

    Attributes:
        available: True: no compiled extension is needed.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """Return `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
