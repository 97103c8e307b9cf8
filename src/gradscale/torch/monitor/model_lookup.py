"""Finds the model that owns given parameters."""

import gc
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, compress, repeat
from typing import Any

from torch import Tensor, nn

from gradscale.torch.locate.module_tracker import LIBRARIES
from gradscale.torch.names import apart

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
        self._groups: list[ModelGroup] = []

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
            models = find_models(params())
            model = models[0] if models else None
            if len(models) > 1:
                model = ModelGroup(models)
                self._groups.append(model)
            self._found[key] = None if model is None else weakref.ref(model)
        return self._found[key]


class ModelGroup(nn.Module):
    """Several models that are trained together, under the names of their variables.

    Does not keep them alive.

    >>> group = ModelGroup([encoder := nn.Linear(2, 2), head := nn.Linear(2, 1)])
    >>> [name for name, _ in group.named_parameters()]
    ['encoder.weight', 'encoder.bias', 'head.weight', 'head.bias']

    Args:
        models: Named after variables of the calling functions, else by their class.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        names = map(variable_name, models)
        kinds = (
            name or type(model).__name__
            for name, model in zip(names, models, strict=True)
        )
        unique = apart(kinds, set())
        self._members = dict(zip(unique, map(weakref.ref, models), strict=True))

    def _alive(self) -> Iterator[tuple[str, nn.Module]]:
        for name, ref in self._members.items():
            model = ref()
            if model is not None:
                yield name, model

    @property
    def training(self) -> bool:  # type: ignore[override]  # of the members
        """Whether one of the models is in training mode."""
        return any(model.training for _, model in self._alive())

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the mode that the base class sets at construction."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the modules of the models."""
        for name, model in self._alive():
            yield from model.named_modules(prefix=name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the parameters of the models."""
        for name, model in self._alive():
            yield from model.named_parameters(prefix=name)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the buffers of the models."""
        for name, model in self._alive():
            yield from model.named_buffers(prefix=name)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name."""
        return dict(self.named_modules())[target]


def variable_name(value: object) -> str:
    """Return the name of a variable of a calling function; empty without one.

    Attributes of its `self` are searched too.

    >>> layer = nn.Linear(1, 1)
    >>> variable_name(layer)
    'layer'
    """
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            owner = frame.f_locals.get("self")
            attributes = {}
            if type(owner).__dictoffset__:
                # Runs no code of the object.
                attributes = object.__getattribute__(owner, "__dict__")
            for scope in (frame.f_locals, attributes, frame.f_globals):
                for name, each in list(scope.items()):
                    if each is value:
                        return str(name)
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return ""


def find_model(params: Sequence[Tensor]) -> nn.Module | None:
    """Return the outermost module that owns the parameters, without its wrappers.

    Of several modules that own equally many, return the one with the fewest others.
    Searches all objects that the garbage collector tracks.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> find_model(list(net[1].parameters())) is net
    True
    >>> find_model([nn.Parameter(torch.ones(2))]) is None
    True
    """
    models = find_models(params)
    return models[0] if models else None


def find_models(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the models that own the parameters, the one with the most first."""
    try:
        return _search({id(param) for param in params})
    except Exception:
        # The search may run code of arbitrary objects, which may raise anything; a
        # missing name must not end the run.
        return []


def _search(wanted: set[int]) -> list[nn.Module]:
    modules = instances_of(nn.Module)
    inner = {id(child) for module in modules for child in _children(module)}
    outermost = [module for module in modules if id(module) not in inner]
    owned = [(_parameter_ids(module), module) for module in outermost]
    found = []
    while wanted:
        # Among modules that own equally many, the first with the fewest others.
        own, best = max(
            owned,
            key=lambda each: (len(wanted & each[0]), -len(each[0])),
            default=(set(), None),
        )
        if best is None or not wanted & own:
            break
        found.append(_unwrapped(best))
        wanted = wanted - own
    return found


def instances_of(base: type) -> list[Any]:
    """Return every object of a type or its subtypes. Searches all tracked objects.

    No other thread runs while `every` refers to all objects: there, `tuple(...)` of a
    generator raises SystemError if the tuple that it fills has a second reference.
    """
    every: list[Any] = []
    # By type: isinstance may run code of the object.
    wanted = map(issubclass, map(type, every), repeat(base))
    # One call of C functions alone, which holds the GIL: fill, select, clear.
    return list(
        chain(
            filter(None, map(every.extend, map(gc.get_objects, (None,)))),
            compress(every, wanted),
            filter(None, map(list.clear, (every,))),
        )
    )


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
