"""Counting the elements of each exponent, by kernels where they run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.torch import tensor_list
from gradscale.torch.kernels import Kernels, on, plain_histogram, usable
from gradscale.torch.kernels.pointer_table import (
    KERNEL_DTYPES,
    PointerTable,
    is_dense,
)


class Counter:
    """Counts in tensors of any kinds, with tables kept from call to call.

    Not for use while a graph is being captured or compiled.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._caches: dict[tuple[torch.device, torch.dtype], PointerTable] = {}

    @torch.no_grad()
    def count(
        self, tensors: Sequence[Tensor], kind: tuple[torch.device, torch.dtype]
    ) -> Tensor:
        """Return i64[n, SLOTS], on the device of the tensors. No host sync.

        Args:
            tensors: float[...] each, none of them empty.
            kind: Device and dtype of all of them.
        """
        device, dtype = kind
        if dtype in KERNEL_DTYPES and usable(self._kernels, device):
            with on(device):
                return self._launch(tensors, kind)
        return plain_histogram.count_tensors(tensors)

    def _launch(
        self, tensors: Sequence[Tensor], kind: tuple[torch.device, torch.dtype]
    ) -> Tensor:
        from gradscale.torch.kernels import histogram

        if kind not in self._caches:
            self._caches[kind] = PointerTable(kind[0], histogram.CHUNK)
        # The order of the elements does not matter, gaps between them do.
        filled = [t if is_dense(t) else t.contiguous() for t in tensors]
        numels = tensor_list.numbers(map(Tensor.numel, filled))
        table = self._caches[kind].of(numels, [tensor_list.addresses(filled)])
        return histogram.count_tensors(table, kind[1])
