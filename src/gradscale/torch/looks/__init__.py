"""Looks at thousands of tensors at once: in C++ once that is built, else in Python.

Anybody may exchange a gradient, the memory of a parameter or an entry of the state
between two steps, so a step looks at every tensor. `plain` says what each look
answers; looks.cpp answers the same in a tenth of the time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.looks import building, plain
from gradscale.torch.looks.building import build, build_soon
from gradscale.torch.looks.plain import Gathered, Kind, Numbers, Survey, numbers

__all__ = [
    "Gathered",
    "Numbers",
    "Survey",
    "addresses",
    "as_before",
    "as_large",
    "build",
    "build_soon",
    "gather",
    "note_writes",
    "numbers",
    "same",
    "same_state",
    "scalars",
    "storages",
    "survey",
    "untouched",
    "versions",
]


def _native() -> Any:
    """Return the module in C++; None where Python must do."""
    return None if torch.compiler.is_compiling() else building.native


def gather(
    params: list[Tensor],
    allow_fp16: bool,
    kind: Kind | None = None,
    before: Numbers | None = None,
) -> Gathered | None:
    """Look as `plain.gather` does."""
    native = _native()
    if native is None:
        return plain.gather(params, allow_fp16, kind, before)
    found = native.gather(params, allow_fp16, kind, before)
    return None if found is None else Gathered._make(found)


def untouched(
    params: list[Tensor], tensors: Sequence[Tensor], begins: Numbers, marks: Numbers
) -> bool:
    """Look as `plain.untouched` does."""
    native, asked = _native(), (params, tensors, begins, marks)
    told = None if native is None else native.untouched(*asked)
    return plain.untouched(*asked) if told is None else told


def addresses(tensors: Sequence[Tensor]) -> Numbers:
    """Look as `plain.addresses` does."""
    native = _native()
    told = None if native is None else native.addresses(tensors)
    return plain.addresses(tensors) if told is None else told


def storages(tensors: Sequence[Tensor]) -> Numbers:
    """Look as `plain.storages` does."""
    native = _native()
    told = None if native is None else native.storages(tensors)
    return plain.storages(tensors) if told is None else told


def survey(lists: list[list[Tensor]]) -> Survey | None:
    """Look as `plain.survey` does."""
    native = _native()
    told = None if native is None else native.survey(lists)
    return plain.survey(lists) if told is None else Survey._make(told)


def as_large(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Look as `plain.as_large` does."""
    native = _native()
    told = None if native is None else native.as_large(lists)
    return plain.as_large(lists) if told is None else told


def as_before(
    lists: Sequence[Sequence[Tensor]], rows: list[Numbers], numels: Numbers
) -> bool:
    """Look as `plain.as_before` does."""
    native = _native()
    told = None if native is None else native.as_before(lists, rows, numels)
    return plain.as_before(lists, rows, numels) if told is None else told


def versions(tensors: Sequence[Tensor]) -> Numbers:
    """Look as `plain.versions` does."""
    native = _native()
    told = None if native is None else native.versions(tensors)
    return plain.versions(tensors) if told is None else told


def note_writes(tensors: list[Tensor]) -> None:
    """Write as `plain.note_writes` does."""
    native = _native()
    if native is None or native.note_writes(tensors) is None:
        plain.note_writes(tensors)


def scalars(vector: Tensor) -> Sequence[Tensor]:
    """Split as `plain.scalars` does."""
    native = _native()
    told = None if native is None else native.scalars(vector)
    return plain.scalars(vector) if told is None else told


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Look as `plain.same` does."""
    native = _native()
    told = None if native is None else native.same(some, others)
    return plain.same(some, others) if told is None else told


def same_state(state: Any, owners: list[Any], values: list[Any]) -> bool:
    """Look as `plain.same_state` does."""
    native = _native()
    told = None if native is None else native.same_state(state, owners, values)
    return plain.same_state(state, owners, values) if told is None else told
