"""Snapshots of many tensors: addresses, versions and sizes, by passes over whole lists.

A gradient, a parameter's memory or an entry of an optimizer's state may be replaced
between two steps, so each step compares them. A `map` over a list takes 50 to 85 ns per
tensor; a Python loop that reads all attributes of each takes five times as long.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

# Of type "q": an int64 for each tensor. Python 3.11 cannot subscript it.
if TYPE_CHECKING:
    Numbers = array[int]
else:
    Numbers = array
Kind = tuple[torch.device, torch.dtype]

REAL_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_GRAD, _DTYPE, _VERSION = map(attrgetter, ("grad", "dtype", "_version"))
_END = object()


class GradSnapshot(NamedTuple):
    """The gradients of some parameters, dense and real, each memory once.

    Taken once a step, and passed to the read, the optimizer and the outcome.

    Attributes:
        params: The parameter behind each entry of `tensors`.
        tensors: float[...] each; views where the gradient is complex, sparse or a
            DTensor, so that writing into them changes the gradient.
        addresses, versions: Of each, the versions of `originals` if there are any:
            while both are the same, so are the values.
        numels: The number of elements of each.
        kind: (device, dtype) of all of them, which are then contiguous and `.grad`
            itself; None if they may differ.
        present: How many parameters have a gradient, empty and shared ones included.
        shared: Two parameters have the same gradient.
        copies: Of each, how many ranks hold the same elements; None if each rank has
            its own.
        wrapped: `.grad` of every parameter that has one, where these are not `tensors`
            themselves; else None.
        originals: If some of `tensors` are read-only copies, sums of sparse duplicates,
            the tensors to write to instead; else None.
    """

    params: list[Tensor]
    tensors: list[Tensor]
    addresses: Numbers
    versions: Numbers
    numels: Numbers
    kind: Kind | None
    present: int
    shared: bool = False
    copies: list[float] | None = None
    wrapped: list[Tensor] | None = None
    originals: list[Tensor] | None = None

    def only(self, places: list[int]) -> "GradSnapshot":
        """Return the snapshot of the gradients at these positions."""
        # While torch.compile traces, addresses, versions and sizes are not known.
        known = places if self.versions else []
        return self._replace(
            params=[self.params[i] for i in places],
            tensors=[self.tensors[i] for i in places],
            addresses=numbers([self.addresses[i] for i in known]),
            versions=numbers([self.versions[i] for i in known]),
            numels=numbers([self.numels[i] for i in known]),
            present=len(places),
            copies=None if self.copies is None else [self.copies[i] for i in places],
        )


class Mark(NamedTuple):
    """A gradient and its version; does not keep the gradient alive.

    `Module.to` and `Module.cpu` swap the gradients of FSDP2, which torch refuses while
    there is a weak reference to one: the mark of a DTensor refers to its local part.

    Attributes:
        tensor: The gradient, or its local part.
        version: Of the gradient; -1 for an inference tensor, which has none.
        tensor_version: Of `tensor`, likewise.
    """

    tensor: ref[Tensor]
    version: int
    tensor_version: int

    def is_of(self, grad: Tensor | None) -> bool:
        """Return whether a gradient is the marked one."""
        return grad is not None and self.tensor() is _plain_part(grad)

    def holds(self, grad: Tensor | None) -> bool:
        """Return whether a gradient is the marked one, and was not written to."""
        return self.is_of(grad) and grad is not None and _version(grad) == self.version

    def follows(self, earlier: "Mark") -> bool:
        """Return whether backward has added to the earlier gradient, in place."""
        same = self.tensor() is earlier.tensor()
        return same and self.version == earlier.version + 1

    def equals(self, other: "Mark | None") -> bool:
        """Return whether another mark is of the same gradient, at the same version."""
        # Not ==: weak references compare what they refer to.
        if other is None or self.tensor() is not other.tensor():
            return False
        return self.version == other.version

    def is_there(self) -> bool:
        """Return whether the gradient exists and was not written to."""
        tensor = self.tensor()
        return tensor is not None and _version(tensor) == self.tensor_version


def mark_of(grad: Tensor) -> Mark:
    """Return the mark of a gradient as it is now."""
    version = -1 if grad.is_inference() else grad._version
    if type(grad) is Tensor:
        return Mark(ref(grad), version, version)
    tensor = _plain_part(grad)
    return Mark(ref(tensor), version, _version(tensor))


def _plain_part(grad: Tensor) -> Tensor:
    return getattr(grad, "_local_tensor", grad)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def numbers(values: Iterable[int]) -> Numbers:
    """Return the numbers as an array of type "q"."""
    # From a list: its length is known.
    return array("q", list(values))


def are_grads(params: list[Tensor], last: GradSnapshot, marks: Numbers) -> bool:
    """Return whether the gradients of `params` still are those of a snapshot.

    Args:
        params: All parameters behind it, those without a gradient too.
        last: The snapshot, of which the memory is compared.
        marks: The versions that its tensors must have.
    """
    now, tensors = list(map(_GRAD, params)), last.tensors
    if len(now) != len(tensors):
        now = [grad for grad in now if grad is not None]
    return (
        len(now) == len(tensors)
        and all(map(is_, now, tensors))
        # While torch.compile traces there are no addresses: these are then lists.
        and array("q", list(map(Tensor.data_ptr, tensors))) == last.addresses
        and array("q", list(map(_VERSION, tensors))) == marks
    )


def addresses(tensors: Sequence[Tensor]) -> Numbers:
    """Return the address of each."""
    return array("q", list(map(Tensor.data_ptr, tensors)))


def storages(tensors: Sequence[Tensor]) -> Numbers:
    """Return a number that identifies the storage of each."""
    return numbers(tensor.untyped_storage()._cdata for tensor in tensors)


def versions(tensors: Sequence[Tensor]) -> Numbers:
    """Return the version of each: the number of writes that autograd has seen."""
    return array("q", list(map(_VERSION, tensors)))


def note_writes(tensors: list[Tensor]) -> None:
    """Increment the version of each after a write without autograd."""
    torch.autograd.graph.increment_version(tensors)


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both hold the same objects, by identity."""
    return len(some) == len(others) and all(map(is_, some, others))


def same_state(state: Any, owners: list[Any], values: list[Any]) -> bool:
    """Return whether an optimizer's state has exactly these owners and values.

    Args:
        state: A dict of entries for each owner.
        owners: Its keys.
        values: The values of all entries, one after the other.
    """
    entries = chain.from_iterable(map(dict.values, state.values()))
    return (
        len(owners) == len(state)
        and all(map(is_, state, owners))
        and all(map(is_, chain(entries, (_END,)), chain(values, (_END,))))
    )
