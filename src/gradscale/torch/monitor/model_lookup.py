"""Finding the model behind parameters that nobody gave a model for."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

# To a model, which is not kept alive.
Root = weakref.ref[nn.Module]

# Each holds one model under this name, and adds nothing to it that has a name.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def root_of(params: Sequence[Tensor]) -> nn.Module | None:
    """Return the largest module that has these parameters, without its wrappers.

    Of several that have as many of them, the one with the fewest others. Looks at
    everything that Python keeps track of, once.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> root_of(list(net[1].parameters())) is net
    True
    >>> root_of([nn.Parameter(torch.ones(2))]) is None
    True
    """
    try:
        return _search({id(param) for param in params})
    except Exception:
        # Looking at everything runs code of everybody. Names are not worth a run.
        return None


def _search(wanted: set[int]) -> nn.Module | None:
    objects = gc.get_objects()
    # By type: asking an object for its class may run its code.
    types = {id(kind): kind for kind in map(type, objects)}
    kinds = {key for key, kind in types.items() if issubclass(kind, nn.Module)}
    modules = [thing for thing in objects if id(type(thing)) in kinds]
    inner = {id(child) for module in modules for child in _children(module)}
    best, most = None, (0, 0)
    for module in modules:
        if id(module) not in inner:
            own = _parameters_of(module)
            known = len(wanted & own)
            if known and (known, -len(own)) > most:
                best, most = module, (known, -len(own))
    return None if best is None else _unwrapped(best)


def _parameters_of(module: nn.Module) -> set[int]:
    """Return the ids of its parameters, without a call of a method of its own."""
    found: set[int] = set()
    seen = {id(module)}
    waiting = [module]
    while waiting:
        here = waiting.pop()
        params = here.__dict__.get("_parameters", {}).values()
        found |= {id(param) for param in params if param is not None}
        for child in _children(here):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found


class Roots:
    """The models behind lists of parameters, looked for once and not kept alive."""

    def __init__(self) -> None:
        self._found: dict[int, Root | None] = {}

    def of(self, key: int, groups: Sequence[Mapping[str, Any]]) -> Root | None:
        """Return a reference to the model that has these parameters, if there is one.

        Args:
            key: Stands for them from the first call on.
            groups: Looked at in the first call, and again once the model is gone:
                those of an optimizer.
        """
        known = self._found.get(key)
        if key not in self._found or (known is not None and known() is None):
            root = root_of([param for group in groups for param in group["params"]])
            self._found[key] = None if root is None else weakref.ref(root)
        return self._found[key]

    def behind(self, optimizer: Any) -> Root | None:
        """Return a reference to the model that has an optimizer's parameters."""
        key = id(optimizer)
        if key not in self._found:
            # The key is an address: it dies with the optimizer. One with __slots__
            # cannot be watched.
            with suppress(TypeError):
                weakref.finalize(optimizer, self._found.pop, key, None)
        return self.of(key, optimizer.param_groups)


def _children(module: nn.Module) -> list[nn.Module]:
    # One that is being made, or was made without its class, has none yet.
    kept = module.__dict__.get("_modules", {})
    return [child for child in kept.values() if child is not None]


def _unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in _WRAPPERS:
        module = getattr(module, _WRAPPERS[type(module).__name__])
    return module
