"""Finds the model that owns given parameters."""

import gc
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

ModelRef = weakref.ref[nn.Module]

# Wrappers, and the attribute that holds the wrapped model. They add no parameters.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


class ModelLookup:
    """Finds the model of an optimizer or of parameters, and caches the result.

    Models are not kept alive. The search is repeated once the model is gone.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, ModelRef | None] = {}

    def of_optimizer(self, optimizer: Any) -> ModelRef | None:
        """Return a reference to the model that owns an optimizer's parameters."""
        key = id(optimizer)
        if key not in self._found:
            # The key is an address: it dies with the optimizer. An optimizer with
            # __slots__ has no weak references.
            with suppress(TypeError):
                weakref.finalize(optimizer, self._found.pop, key, None)
        return self._cached(
            key,
            lambda: [p for group in optimizer.param_groups for p in group["params"]],
        )

    def of_params(self, params: Sequence[Tensor]) -> ModelRef | None:
        """Return a reference to the model that owns parameters."""
        return self._cached(tuple(map(id, params)), lambda: params)

    def _cached(
        self, key: Hashable, params: Callable[[], Sequence[Tensor]]
    ) -> ModelRef | None:
        known = self._found.get(key)
        if key not in self._found or (known is not None and known() is None):
            model = find_model(params())
            self._found[key] = None if model is None else weakref.ref(model)
        return self._found[key]


def find_model(params: Sequence[Tensor]) -> nn.Module | None:
    """Return the outermost module that owns the parameters, without its wrappers.

    Of several modules that own equally many of them, the one with the fewest others.
    Searches all objects that the garbage collector tracks.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> find_model(list(net[1].parameters())) is net
    True
    >>> find_model([nn.Parameter(torch.ones(2))]) is None
    True
    """
    try:
        return _search({id(param) for param in params})
    except Exception:
        # The search may run code of arbitrary objects, which may raise anything; a
        # missing name must not end the run.
        return None


def _search(wanted: set[int]) -> nn.Module | None:
    objects = gc.get_objects()
    # By type: isinstance may run code of the object.
    types = {id(kind): kind for kind in map(type, objects)}
    module_types = {key for key, kind in types.items() if issubclass(kind, nn.Module)}
    modules = [each for each in objects if id(type(each)) in module_types]
    inner = {id(child) for module in modules for child in _children(module)}
    best, most = None, (0, 0)
    for module in modules:
        if id(module) not in inner:
            own = _parameter_ids(module)
            known = len(wanted & own)
            if known and (known, -len(own)) > most:
                best, most = module, (known, -len(own))
    return None if best is None else _unwrapped(best)


def _parameter_ids(module: nn.Module) -> set[int]:
    """Return the ids of all parameters, without calling the module's methods."""
    ids: set[int] = set()
    visited = {id(module)}
    stack = [module]
    while stack:
        here = stack.pop()
        params = here.__dict__.get("_parameters", {}).values()
        ids |= {id(param) for param in params if param is not None}
        for child in _children(here):
            if id(child) not in visited:
                visited.add(id(child))
                stack.append(child)
    return ids


def _children(module: nn.Module) -> list[nn.Module]:
    # A module whose __init__ has not run yet has no `_modules`.
    children = module.__dict__.get("_modules", {})
    return [child for child in children.values() if child is not None]


def _unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in _WRAPPERS:
        module = getattr(module, _WRAPPERS[type(module).__name__])
    return module
