"""Names of parameters, for errors and culprits."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def names_of(params: Sequence[Tensor | str], sources: Iterable[Any] = ()) -> list[str]:
    """Name parameters by the model's own names, else by group and index.

    Args:
        params: The parameters to name. A name is returned as it is.
        sources: Modules, weak references to them, and optimizers to search, in this
            order; None is skipped.
    """
    known: dict[int, str] = {}
    wanted = list(map(id, params))
    for source in sources:
        if known.keys() >= set(wanted):
            break
        if isinstance(source, weakref.ref):
            source = source()
        if isinstance(source, torch.nn.Module):
            for name, param in yielded_by(source.named_parameters):
                known.setdefault(id(param), name)
        elif source is not None:
            _name_by_place(known, source.param_groups)
    pairs = zip(wanted, params, strict=True)
    return [known[key] if key in known else _described(p) for key, p in pairs]


def yielded_by(method: Callable[[], Iterable[_T]]) -> list[_T]:
    """Return what a method of a model or optimizer yields; nothing if it fails.

    >>> yielded_by(torch.nn.Linear(1, 1).named_modules)
    [('', Linear(in_features=1, out_features=1, bias=True))]
    """
    try:
        return list(method())
    except Exception:
        # Their code may raise anything; a missing name must not end the run.
        return []


def apart(names: Iterable[str], taken: set[str]) -> list[str]:
    """Return the names, numbered where already taken, and add them to `taken`.

    >>> taken = set()
    >>> apart(["0.weight", "0.bias"], taken), apart(["0.weight"], taken)
    (['0.weight', '0.bias'], ['0.weight #2'])
    """
    free = []
    for name in names:
        number, own = 1, name
        while own in taken:
            number += 1
            own = f"{name} #{number}"
        taken.add(own)
        free.append(own)
    return free


def _name_by_place(known: dict[int, str], groups: Sequence[dict[str, Any]]) -> None:
    for g, group in enumerate(groups):
        own = group.get("param_names")
        for i, param in enumerate(group["params"]):
            name = own[i] if own else f"param_groups[{g}]['params'][{i}]"
            known.setdefault(id(param), name)


def _described(param: Tensor | str) -> str:
    if isinstance(param, str):
        return param
    return f"a parameter of shape {tuple(param.shape)}"
