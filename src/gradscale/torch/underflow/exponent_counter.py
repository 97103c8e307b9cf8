"""Exponent histograms of tensors, by the kernel where it runs, else by torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.torch.kernels import Kernels, on, plain, usable
from gradscale.torch.kernels.pointer_table import (
    KERNEL_DTYPES,
    PointerTable,
    is_dense,
)
from gradscale.torch.tensor_list import Kind, addresses, numbers


class Counter:
    """Counts elements by exponent, with pointer tables kept from call to call.

    Must not be used while a graph is being captured or compiled.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._tables: dict[Kind, PointerTable] = {}

    @torch.no_grad()
    def count(self, tensors: Sequence[Tensor], kind: Kind) -> Tensor:
        """Return i64[n, SLOTS], on the device of the tensors. No host sync.

        Args:
            tensors: float[...] each, none of them empty.
            kind: Device and dtype of all of them.
        """
        device, dtype = kind
        if dtype not in KERNEL_DTYPES or not usable(self._kernels, device):
            return plain.count_tensors(tensors)
        # Imported here: Triton may be missing.
        from gradscale.torch.kernels.histogram import CHUNK, count_tensors

        if kind not in self._tables:
            self._tables[kind] = PointerTable(device, CHUNK)
        # The order of the elements does not matter, gaps between them do.
        dense = [t if is_dense(t) else t.contiguous() for t in tensors]
        numels = numbers(map(Tensor.numel, dense))
        with on(device):
            table = self._tables[kind].of(numels, [addresses(dense)])
            return count_tensors(table, dtype)
