"""What an optimizer keeps between steps so that a pass starts at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch import tensor_list
from gradscale.torch.kernels.pointer_table import Table, TableCache


class Plan(NamedTuple):
    """How the tensors of some lists are reached.

    Attributes:
        table: Of those that a kernel can walk; None if there are none.
        rest: Places of the others.
    """

    table: Table | None
    rest: list[int]


class Plans:
    """The plan of one batch, made anew only where an address has changed.

    A kernel walks the tensors of one parameter element by element in the order of
    their memory, so they must all lie in the same order and without gaps.
    """

    def __init__(self) -> None:
        self._cache: TableCache | None = None
        # All lists but that of the gradients, and where their tensors begin.
        self._shaped: list[Sequence[Tensor]] = []
        self._steps: list[Tensor] = []
        self._begins: list[tensor_list.Numbers] = []
        # Of all parameters, of as many counts, and of those that are in the table.
        self._sizes = self._ones = self._numels = tensor_list.numbers(())
        self._rest: list[int] = []
        self._contiguous = False
        self._confirmed = False

    def of(
        self,
        lists: Sequence[Sequence[Tensor]],
        steps: list[Tensor],
        chunk: int,
        grads_at: tensor_list.Numbers | None = None,
    ) -> Plan:
        """Return the plan. No host sync.

        Args:
            lists: For each row of the table, a tensor of each parameter; parameters
                first, gradients second, which somebody has seen to be as large.
            steps: f32[] each, for one more row; perhaps empty.
            chunk: How many elements one program works on.
            grads_at: As in `Handed`.
        """
        params, grads, *more = lists
        shaped = [params, *more]
        others = [*shaped, steps] if steps else shaped
        same = tensor_list.same(others, self._others())
        held = same and (self._confirmed or self._hold())
        self._confirmed = False
        begins = self._begins if held else list(map(tensor_list.addresses, others))
        in_order = grads_at is not None or all(map(Tensor.is_contiguous, grads))
        if not (held and self._contiguous and in_order):
            self._look(lists)
        self._shaped, self._steps, self._begins = shaped, steps, begins
        if not self._numels:
            return Plan(None, self._rest)
        if self._cache is None:
            self._cache = TableCache(params[0].device, chunk)
        if grads_at is None:
            grads_at = tensor_list.addresses(grads)
        rows = [begins[0], grads_at, *begins[1:]]
        if self._rest:
            left_out = set(self._rest)
            rows = [
                tensor_list.numbers(a for i, a in enumerate(row) if i not in left_out)
                for row in rows
            ]
        return Plan(self._cache.of(self._numels, rows), self._rest)

    def confirm(
        self, lists: list[list[Tensor]], numels: tensor_list.Numbers | None
    ) -> bool:
        """Return whether all lie as they did in the last step, gradients elsewhere.

        Then `of`, which comes next, need not look again.

        Args:
            lists: All but that of the gradients, in any order.
            numels: How many elements the gradients have; None to leave them out.
        """
        known = {*map(id, lists)} == {*map(id, self._others())}
        fit = numels is None or numels == self._sizes
        self._confirmed = known and fit and self._hold()
        return self._confirmed

    def _others(self) -> list[Sequence[Tensor]]:
        return [*self._shaped, self._steps] if self._steps else self._shaped

    def _hold(self) -> bool:
        """Return whether all but the gradients lie as they did when last looked at.

        Gradients may come to lie elsewhere in every step, the others do not.
        """
        split = len(self._shaped)
        begins, counts = self._begins[:split], self._begins[split:]
        return tensor_list.as_before(self._shaped, begins, self._sizes) and (
            not self._steps or tensor_list.as_before([self._steps], counts, self._ones)
        )

    def _look(self, lists: Sequence[Sequence[Tensor]]) -> None:
        """Find out which tensors can be walked."""
        self._contiguous = all(all(map(Tensor.is_contiguous, one)) for one in lists)
        self._sizes = tensor_list.numbers(map(Tensor.numel, lists[0]))
        self._ones = tensor_list.numbers([1] * len(lists[0]))
        together = list(zip(*lists, strict=True))
        kinds = [(one[0].dtype, one[0].device) for one in lists]
        self._rest = [
            place
            for place, tensors in enumerate(together)
            if tensors[0].numel() == 0 or not in_step(tensors, kinds)
        ]
        left_out = set(self._rest)
        self._numels = tensor_list.numbers(
            tensors[0].numel()
            for place, tensors in enumerate(together)
            if place not in left_out
        )


def in_step(
    tensors: Sequence[Tensor], kinds: Sequence[tuple[torch.dtype, torch.device]]
) -> bool:
    """Return whether the values lie in memory in the same order, without gaps."""
    # Whoever exchanges the memory of a tensor may exchange its dtype with it.
    if [(tensor.dtype, tensor.device) for tensor in tensors] != list(kinds):
        return False
    first = tensors[0]
    if any(tensor.shape != first.shape or tensor.is_neg() for tensor in tensors):
        return False
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    same = all(tensor.stride() == first.stride() for tensor in tensors)
    return same and is_dense(first)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a piece of memory, each of them once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


KERNEL_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
