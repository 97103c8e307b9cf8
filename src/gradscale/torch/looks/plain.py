"""The looks in Python: what looks.cpp does, pass by pass over whole lists.

Each pass runs at the speed of C: for 4000 tensors, a fifth of the time of one loop that
asks each for everything.
"""

from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

# An array of type "q": an int64 for each tensor.
Numbers = MutableSequence[int]
Kind = tuple[torch.device, torch.dtype]

REAL_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_GRAD, _DTYPE, _VERSION = map(attrgetter, ("grad", "dtype", "_version"))
_END = object()


class Gathered(NamedTuple):
    """Gradients that are dense, contiguous, of one device and dtype, and apart.

    Attributes:
        params: The parameters that have one.
        tensors: float[...] each, at least one; in C++ a sequence that makes an object
            for one only when it is asked for.
        addresses, versions, numels: Of each gradient.
    """

    params: list[Tensor]
    tensors: Sequence[Tensor]
    addresses: Numbers
    versions: Numbers
    numels: Numbers


class Survey(NamedTuple):
    """What a kernel must know of lists that it is to walk together.

    Attributes:
        rows: For each list, where its tensors begin.
        numels: How many elements those of the first list have.
        contiguous: All of all lists are, and but for the last list, of counts, they
            have as many elements.
    """

    rows: list[Numbers]
    numels: Numbers
    contiguous: bool


def numbers(values: Iterable[int]) -> Numbers:
    """Return the numbers as an array of type "q"."""
    # From a list: its length is known.
    return array("q", list(values))


def gather(
    params: list[Tensor],
    allow_fp16: bool,
    kind: Kind | None,
    before: Numbers | None,
) -> Gathered | None:
    """Return the gradients if all are ordinary; else None.

    Args:
        params: Perhaps some without a gradient.
        allow_fp16: Take f16 for ordinary.
        kind: Device and dtype of gradients that were found to be apart, if there were
            any.
        before: The addresses of those: gradients that lie there are apart as well.
    """
    if not set(map(type, params)) <= {Tensor, torch.nn.Parameter}:
        return None
    tensors = list(map(_GRAD, params))
    kinds = set(map(type, tensors))
    if kinds != {Tensor}:
        if kinds != {Tensor, type(None)}:
            return None
        params = [
            p for p, grad in zip(params, tensors, strict=True) if grad is not None
        ]
        tensors = list(map(_GRAD, params))
    if any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_inference, tensors)):
        return None
    dtypes = set(map(_DTYPE, tensors))
    accepted = REAL_DTYPES if allow_fp16 else REAL_DTYPES - {torch.float16}
    if len(dtypes) > 1 or not dtypes <= accepted:
        return None
    try:
        begins = addresses(tensors)
        contiguous = all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:
        # A sparse tensor has neither.
        return None
    # An address tells the device as well.
    known = begins == before and kind == (tensors[0].device, tensors[0].dtype)
    if not contiguous or not (known or _seem_apart(tensors, begins)):
        return None
    numels = numbers(map(Tensor.numel, tensors))
    return Gathered(params, tensors, begins, versions(tensors), numels)


def _seem_apart(tensors: list[Tensor], begins: Numbers) -> bool:
    """Return whether each has memory of its own, all on one device.

    An empty one has no address.
    """
    if len(set(map(Tensor.get_device, tensors))) > 1:
        return False
    distinct = len(set(begins)) == len(begins) and 0 not in begins
    return distinct and not any(map(Tensor._is_view, tensors))


def untouched(
    params: list[Tensor], tensors: Sequence[Tensor], begins: Numbers, marks: Numbers
) -> bool:
    """Return whether the gradients are these tensors, there and in these versions."""
    now = list(map(_GRAD, params))
    if len(now) != len(tensors):
        now = [grad for grad in now if grad is not None]
    return (
        same(now, tensors)
        and addresses(tensors) == begins
        and versions(tensors) == marks
    )


def addresses(tensors: Sequence[Tensor]) -> Numbers:
    """Return where the tensors begin."""
    return numbers(map(Tensor.data_ptr, tensors))


def storages(tensors: Sequence[Tensor]) -> Numbers:
    """Return what tells the memory of each from all that is there at this time."""
    return numbers(tensor.untyped_storage()._cdata for tensor in tensors)


def survey(lists: list[list[Tensor]]) -> Survey | None:
    """Return what a kernel must know; None if the values of one are not in its memory.

    Such as one of a class of its own.
    """
    ordinary = {Tensor, torch.nn.Parameter}
    if not all({*map(type, one)} <= ordinary for one in lists):
        return None
    if any(any(map(Tensor.is_neg, one)) for one in lists):
        return None
    sizes = [numbers(map(Tensor.numel, one)) for one in lists[:-1]]
    contiguous = all(all(map(Tensor.is_contiguous, one)) for one in lists)
    alike = all(one == sizes[0] for one in sizes)
    numels = sizes[0] if sizes else numbers(map(Tensor.numel, lists[0]))
    return Survey(list(map(addresses, lists)), numels, contiguous and alike)


def as_large(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the tensors at each place of all lists have as many elements."""
    first, *others = (list(map(Tensor.numel, one)) for one in lists)
    return all(one == first for one in others)


def as_before(
    lists: Sequence[Sequence[Tensor]], rows: list[Numbers], numels: Numbers
) -> bool:
    """Return whether the tensors of each list lie as they did.

    Args:
        lists: As many tensors in each.
        rows: For each list, where its tensors began.
        numels: How many elements those of each list had, without gaps.
    """
    return list(map(addresses, lists)) == rows and all(
        all(map(Tensor.is_contiguous, one))
        and numbers(map(Tensor.numel, one)) == numels
        for one in lists
    )


def versions(tensors: Sequence[Tensor]) -> Numbers:
    """Return how often autograd has seen a write to each."""
    return numbers(map(_VERSION, tensors))


def note_writes(tensors: list[Tensor]) -> None:
    """Tell autograd of a write to each that it has not seen."""
    torch.autograd.graph.increment_version(tensors)


def scalars(vector: Tensor) -> Sequence[Tensor]:
    """Return each element by itself, sharing its memory. No gradient goes through."""
    return vector.unbind()


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both hold the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def same_state(state: Any, owners: list[Any], values: list[Any]) -> bool:
    """Return whether an optimizer's state has these owners, and these values in all.

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
