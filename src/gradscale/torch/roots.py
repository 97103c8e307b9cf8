"""Finding the model behind parameters that nobody gave a model for."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

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
    wanted = {id(param) for param in params}
    objects = gc.get_objects()
    # By type: asking an object for its class may run its code.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    modules = [thing for thing in objects if type(thing) in kinds]
    inner = {id(child) for module in modules for child in _children(module)}
    best, most = None, (0, 0)
    for module in modules:
        # Without this entry a module has no parameters to ask for.
        if id(module) not in inner and "_modules" in module.__dict__:
            own = [id(param) for param in module.parameters()]
            known = len(wanted.intersection(own))
            if known and (known, -len(own)) > most:
                best, most = module, (known, -len(own))
    return None if best is None else _unwrapped(best)


class Roots:
    """The models behind lists of parameters, looked for once and not kept alive."""

    def __init__(self) -> None:
        self._found: dict[int, Callable[[], nn.Module | None]] = {}

    def of(self, key: int, groups: Sequence[Mapping[str, Any]]) -> nn.Module | None:
        """Return the model that has these parameters, if there is one.

        Args:
            key: Stands for them from the first call on.
            groups: Looked at in the first call: those of an optimizer.
        """
        if key not in self._found:
            root = root_of([param for group in groups for param in group["params"]])
            self._found[key] = _nothing if root is None else weakref.ref(root)
        return self._found[key]()

    def forget(self, key: int) -> None:
        """Forget the parameters that this stands for."""
        self._found.pop(key, None)


def _nothing() -> None:
    return None


def _children(module: nn.Module) -> list[nn.Module]:
    # One that is being made, or was made without its class, has none yet.
    kept = module.__dict__.get("_modules", {})
    return [child for child in kept.values() if child is not None]


def _unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in _WRAPPERS:
        module = getattr(module, _WRAPPERS[type(module).__name__])
    return module
