"""Reads gradients by kernels, with one pointer table kept for each dtype and device."""

import math
from collections.abc import Sequence

from torch import Tensor

from gradscale.torch.kernels import Kernels, on, usable
from gradscale.torch.kernels.plain import Decision, TensorStats
from gradscale.torch.kernels.pointer_table import (
    KERNEL_DTYPES,
    PointerTable,
    is_dense,
)
from gradscale.torch.tensor_list import Kind, Numbers, addresses


class GradReader:
    """Reads the gradients of one optimizer, step after step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._tables: dict[tuple[Kind, int], PointerTable] = {}

    def reads(self, kind: Kind, norm_type: float | None) -> bool:
        """Return whether kernels can read this kind with a norm of this order."""
        known = norm_type in (None, 2.0, math.inf) and kind[1] in KERNEL_DTYPES
        return known and usable(self._kernels, kind[0])

    def read(
        self,
        tensors: Sequence[Tensor],
        kind: Kind,
        begins: Numbers | None,
        numels: Numbers,
        scale: Tensor,
        max_norm: float | None,
        place: int = 0,
        *,
        unscale: bool = False,
    ) -> tuple[TensorStats, Decision]:
        """Return the statistics and the decision. Two launches, no host sync.

        Args:
            tensors: float[...] each, none of them empty.
            kind: Device and dtype of all of them; one that `reads` accepts.
            begins: Their addresses where all are contiguous; None if not known.
            numels: The number of elements of each.
            scale: f32[], the scale of the gradients.
            max_norm: The maximum 2-norm; None for no clip.
            place: The index of the list within a step; each has a table of its own.
            unscale: Also multiply them by `1 / scale` in place. All are then dense.
        """
        # Imported here: Triton may be missing.
        from gradscale.torch.kernels.decide import gather_and_decide
        from gradscale.torch.kernels.read import CHUNK, read_chunks

        device, dtype = kind
        if (kind, place) not in self._tables:
            self._tables[kind, place] = PointerTable(device, CHUNK)
        if begins is None:
            if not all(map(Tensor.is_contiguous, tensors)):
                # The order of the elements does not matter, gaps between them do.
                tensors = [t if is_dense(t) else t.contiguous() for t in tensors]
            begins = addresses(tensors)
        if scale.device != device:
            scale = scale.to(device, non_blocking=True)
        with on(device):
            table = self._tables[kind, place].of(numels, [begins])
            partial = read_chunks(table, dtype, scale if unscale else None)
            return gather_and_decide(partial, dtype, scale, max_norm)
