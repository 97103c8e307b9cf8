"""Parameters of one group that one pass walks over together."""

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import looks
from gradscale.torch.kernels.lists import Seen
from gradscale.torch.kernels.updating import Plans
from gradscale.torch.optim.entries import MASTER

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))

Mark = tuple[int | None, int | None]


class Batch:
    """One device, one dtype of parameters, one dtype of gradients.

    Attributes:
        owners: The parameters as their group has them.
        params: float[...] each, the same as a pass takes them.
        columns: For each entry of the state, float[...] of each parameter.
        wide: The dtype of the arithmetic.
        device: Where all of it lies.
        plans: What the kernels keep from step to step.
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
            marks: Version and address of each parameter after the last own write.
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
        self._numels = looks.numbers(map(Tensor.numel, self.params))
        self._chosen = chosen
        self._grad_dtypes = {grad.dtype}
        self._grad_places = {grad.get_device()}
        self._versions: Sequence[int | None] = [version for version, _ in marks]
        self._addresses: Sequence[int | None] = [address for _, address in marks]

    def is_for(self, seen: Seen) -> bool:
        """Return whether these are gradients of all of its parameters."""
        device, dtype = seen.kind
        return (
            self._chosen is None
            and device == self.device
            and {dtype} == self._grad_dtypes
            and seen.numels == self._numels
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
        versions = looks.versions(self.owners)
        addresses = looks.addresses(self.params)
        if versions == self._versions and addresses == self._addresses:
            return
        now = zip(versions, addresses, strict=True)
        before = zip(self._versions, self._addresses, strict=True)
        changed = [mark != old for mark, old in zip(now, before, strict=True)]
        pairs = zip(self.params, self.columns[MASTER], strict=True)
        for param, master in compress(pairs, changed):
            same = master.to(param.dtype) == param
            master.copy_(torch.where(same, master, param.to(master.dtype)))
        self._addresses = addresses

    def note_own_write(self) -> None:
        """Remember the parameters as this optimizer has left them."""
        if self.params is not self.owners:
            # Autograd has seen a write to the local tensor, not to the whole.
            torch.autograd.graph.increment_version(self.owners)
        if MASTER in self.columns:
            self._versions = looks.versions(self.owners)

    def marks(self) -> dict[int, Mark]:
        """Return version and address of each parameter after the last own write."""
        marks = zip(self._versions, self._addresses, strict=True)
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
