"""Parameters of one group that one pass walks over together."""

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradscale.torch import tensor_list
from gradscale.torch.kernels.optimizer_pass import Plans
from gradscale.torch.optim.state import MASTER
from gradscale.torch.tensor_list import GradSnapshot

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


class Mark(NamedTuple):
    """How an optimizer has left a parameter.

    Attributes:
        version: How often it was written to.
        address: Where it began.
        memory: In what; held weakly, so that no other memory is taken for it.
    """

    version: int | None = None
    address: int | None = None
    memory: StorageWeakRef | None = None


class Batch:
    """One device, one dtype of parameters, one dtype of gradients.

    Attributes:
        owners: The parameters as their group has them.
        params: float[...] each, the same as a pass takes them.
        columns: For each entry of the state, float[...] of each parameter.
        wide: The dtype of the arithmetic.
        device: Where all of it lies.
        plans: What the kernels keep from step to step.
        numels: How many elements each parameter had when this was made.
    """

    def __init__(
        self,
        owners: list[Tensor],
        columns: dict[str, list[Tensor]],
        chosen: list[bool] | None,
        grad: Tensor,
        plans: Plans,
        marks: list[Mark],
    ) -> None:
        """Hold the tensors; none is read or written.

        Args:
            owners: See the attributes.
            columns: For each entry of the state, the tensors as the state has them.
            chosen: Which parameters of the group these are; None for all.
            grad: One of their gradients; the others are like it.
            plans: See the attributes.
            marks: How each parameter was left by the last own write.
        """
        self.owners = owners
        self.params, self.columns = owners, columns
        if not all(map(is_plain, owners)):
            self.params = [plain(param) for param in owners]
            self.columns = {
                name: [plain(entry) for entry in entries]
                for name, entries in columns.items()
            }
        self.wide = (
            self.columns[MASTER][0] if MASTER in columns else self.params[0]
        ).dtype
        self.device = owners[0].device
        self.plans = plans
        self.numels = tensor_list.numbers(map(Tensor.numel, self.params))
        self._chosen = chosen
        self._grad_dtypes = {grad.dtype}
        self._grad_places = {grad.get_device()}
        self._versions: Sequence[int | None] = [mark.version for mark in marks]
        self._addresses: Sequence[int | None] = [mark.address for mark in marks]
        self._memories = [mark.memory for mark in marks]
        self._storages: Sequence[int | None] = [
            None if memory is None else memory.cdata for memory in self._memories
        ]

    def is_for(self, seen: GradSnapshot) -> bool:
        """Return whether these are gradients of all of its parameters."""
        assert seen.kind is not None
        device, dtype = seen.kind
        return (
            self._chosen is None
            and device == self.device
            and {dtype} == self._grad_dtypes
            and seen.numels == self.numels
        )

    def grads_among(self, grads: list[Any]) -> list[Tensor] | None:
        """Return those that belong here; None if one of them no longer does.

        A few passes over whole lists: 60 ns for each gradient and pass, where a loop
        in Python would take ten times as long.
        """
        if self._chosen is not None:
            grads = list(compress(grads, self._chosen))
        fit = (
            set(map(_DTYPE, grads)) == self._grad_dtypes
            and set(map(_LAYOUT, grads)) == {torch.strided}
            and set(map(Tensor.get_device, grads)) == self._grad_places
            and not any(map(Tensor.is_neg, grads))
        )
        return grads if fit else None

    def take_over_(self) -> None:
        """Let masters follow parameters that somebody else has written. No sync.

        Elements that still are their master rounded keep the digits of the master.
        """
        if MASTER not in self.columns:
            return
        versions = tensor_list.versions(self.owners)
        addresses = tensor_list.addresses(self.params)
        storages = tensor_list.storages(self.params)
        now = versions, addresses, storages
        before = self._versions, self._addresses, self._storages
        if now == before:
            return
        marks = zip(zip(*now, strict=True), zip(*before, strict=True), strict=True)
        changed = [mark != old for mark, old in marks]
        pairs = zip(self.params, self.columns[MASTER], strict=True)
        for param, master in compress(pairs, changed):
            same = master.to(param.dtype) == param
            master.copy_(torch.where(same, master, param.to(master.dtype)))
        self._addresses = addresses
        if storages != self._storages:
            memories = (param.untyped_storage() for param in self.params)
            self._memories = list(map(StorageWeakRef, memories))
            self._storages = storages

    def note_own_write(self) -> None:
        """Remember the parameters as this optimizer has left them."""
        if self.params is not self.owners:
            # Autograd has seen a write to the local tensor, not to the whole.
            torch.autograd.graph.increment_version(self.owners)
        if MASTER in self.columns:
            self._versions = tensor_list.versions(self.owners)

    def marks(self) -> dict[int, Mark]:
        """Return how each parameter was left by the last own write."""
        marks = map(Mark, self._versions, self._addresses, self._memories)
        return dict(zip(map(id, self.owners), marks, strict=True))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a pass takes the tensor itself."""
    if tensor.is_complex():
        return False
    # Asking a Tensor for an attribute that it lacks takes a microsecond.
    return type(tensor) in _ORDINARY or not hasattr(tensor, "to_local")


def plain(tensor: Tensor) -> Tensor:
    """Return a real tensor of this process that shares the memory."""
    if is_plain(tensor):
        return tensor
    to_local = getattr(tensor, "to_local", None)
    local = tensor if to_local is None else to_local()
    return torch.view_as_real(local) if local.is_complex() else local


def like_its_parameter(param: Any, grad: Any) -> Any:
    """Return the gradient with values as they lie, sharded like the parameter."""
    if grad.is_conj():
        grad = param.grad = grad.resolve_conj()
    if grad.is_neg():
        grad = param.grad = grad.resolve_neg()
    if (
        not is_plain(param)
        and hasattr(param, "placements")
        and grad.placements != param.placements
    ):
        grad = param.grad = grad.redistribute(placements=param.placements)
    return grad
