"""Reading gradients of one kind by kernels, with tables kept from step to step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.torch import tensor_list
from gradscale.torch.kernels import Kernels, on, reference, usable
from gradscale.torch.kernels.decision import Decision
from gradscale.torch.kernels.facts import TensorFacts
from gradscale.torch.kernels.pointer_table import (
    KERNEL_DTYPES,
    PointerTable,
    is_dense,
)
from gradscale.torch.kernels.torch_fused_adam import StandIn
from gradscale.torch.tensor_list import Numbers


class Reader:
    """Reads the gradients of one optimizer, step after step.

    Attributes:
        stand_in: Steps the optimizer, where it is one of torch's that it can step.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.stand_in = StandIn(kernels)
        self._kernels = kernels
        self._caches: dict[tuple[torch.device, torch.dtype, int], PointerTable] = {}

    def read(
        self,
        tensors: Sequence[Tensor],
        norm_type: float | None,
        kind: tuple[torch.device, torch.dtype],
        begins: Numbers | None = None,
        numels: Numbers | None = None,
        place: int = 0,
    ) -> TensorFacts | None:
        """Return the facts; None where plain operations must find them. No host sync.

        Args:
            tensors: float[...] each, none of them empty.
            norm_type: The order of the norm that will be asked for, or None.
            kind: Device and dtype of all of them.
            begins: Where they begin, if somebody has just looked: they are then
                contiguous.
            numels: How many elements each has, if somebody has just looked.
            place: Among the lists that are read together, for each has its table until
                all are gathered.
        """
        known = norm_type in (None, 2.0, math.inf) and kind[1] in KERNEL_DTYPES
        if not known or not usable(self._kernels, kind[0]):
            return None
        with on(kind[0]):
            return self._read(tensors, kind, begins, numels, place)

    def decide(
        self, facts: TensorFacts, scale: Tensor, max_norm: float | None
    ) -> Decision:
        """Return all that follows from the facts alone. No host sync.

        Args:
            facts: What `read` returned.
            scale: f32[], the scale behind the gradients, on their device.
            max_norm: The largest 2-norm to let through; None to let all through.
        """
        if facts.parts is not None and usable(self._kernels, scale.device):
            from gradscale.torch.kernels.decide import decide

            with on(scale.device):
                return decide(facts, scale, max_norm)
        return reference.decide(facts, scale, max_norm)

    def _read(
        self,
        tensors: Sequence[Tensor],
        kind: tuple[torch.device, torch.dtype],
        begins: Numbers | None,
        numels: Numbers | None,
        place: int,
    ) -> TensorFacts:
        from gradscale.torch.kernels.read import CHUNK, read_tensors

        key = *kind, place
        if key not in self._caches:
            self._caches[key] = PointerTable(kind[0], CHUNK)
        if begins is None:
            if not all(map(Tensor.is_contiguous, tensors)):
                # The order of the elements does not matter, gaps between them do.
                tensors = [t if is_dense(t) else t.contiguous() for t in tensors]
            begins = tensor_list.addresses(tensors)
        if numels is None:
            numels = tensor_list.numbers(map(Tensor.numel, tensors))
        table = self._caches[key].of(numels, [begins])
        return read_tensors(table, kind[1])
