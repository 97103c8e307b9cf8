"""Saves and restores everything that a forward and backward pass changes."""

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch.locate.forward_hooks import is_plain, plain_tensors
from gradscale.torch.rng import RngState

CONTAINERS = (dict, list, set, deque)
# A container and its content.
SavedContainer = tuple[Any, dict[Any, Any] | list[Any]]


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore on exit all that a forward and backward pass changes, except weights.

    Restored are random number generators (torch's on all devices, Python's, NumPy's if
    it is loaded), the attributes, buffers, hooks and flags of every module, the lists,
    dicts, sets and deques among the attributes, and the `.grad` of every parameter.
    Compiled modules run eagerly, and `DistributedDataParallel` runs without its
    reducer, so that no collective is called. `ReplayMode` restores the weights, and
    other tensors that modules hold, because it sees each write.
    """
    with ExitStack() as stack:
        stack.enter_context(_preserve_rng())
        stack.enter_context(_preserve_modules(model))
        stack.enter_context(_preserve_grads(model))
        stack.enter_context(_force_eager())
        yield


@contextmanager
def _preserve_rng() -> Iterator[None]:
    state = RngState()
    try:
        yield
    finally:
        state.restore()


@contextmanager
def _preserve_modules(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    scripted = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]
    plain = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    saved = [(module, dict(module.__dict__)) for module in plain]
    containers = _containers_of(plain)
    # Scripted modules hold their buffers outside __dict__: values are written back.
    values = [(b, b.clone()) for m in scripted for b in m.buffers(recurse=False)]
    _copy_buffers(plain)
    _bypass_reducers(plain)
    try:
        yield
    finally:
        for container, content in containers:
            # In place: handles of hooks refer to these very dictionaries.
            _refill(container, content)
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for buffer, value in values:
            with torch.no_grad():
                buffer.copy_(value)


def _containers_of(modules: list[nn.Module]) -> list[SavedContainer]:
    """Return the containers among the attributes of modules, with their contents.

    Includes the private dictionaries of parameters, buffers, submodules and hooks, and
    containers inside containers.
    """
    found: dict[int, SavedContainer] = {}
    stack = [value for module in modules for value in module.__dict__.values()]
    while stack:
        value = stack.pop()
        # By type: isinstance may run code of the object.
        if id(value) not in found and issubclass(type(value), CONTAINERS):
            content = _content(value)
            found[id(value)] = value, content
            stack += content.values() if isinstance(content, dict) else content
    return list(found.values())


def _content(container: Any) -> dict[Any, Any] | list[Any]:
    is_dict = issubclass(type(container), dict)
    return dict(container.items()) if is_dict else list(container)


def _refill(container: Any, content: dict[Any, Any] | list[Any]) -> None:
    """Restore the content of a container, in place."""
    if _identities(_content(container)) == _identities(content):
        return
    container.clear()
    if issubclass(type(container), (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def _identities(content: dict[Any, Any] | list[Any]) -> list[Any]:
    # Not by equality: that of tensors is a tensor.
    if isinstance(content, dict):
        return [(id(key), id(value)) for key, value in content.items()]
    return list(map(id, content))


def _copy_buffers(modules: list[nn.Module]) -> None:
    """Replace the buffers of the modules by copies."""
    copies: dict[int, Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                # Two modules may share a buffer.
                copy = copies.setdefault(id(buffer), buffer.detach().clone())
                module._buffers[name] = copy


def _bypass_reducers(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module.__dict__["forward"] = _ForwardWithoutReducer(module)


class _ForwardWithoutReducer:
    """The forward pass of a `DistributedDataParallel` module on one rank."""

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        wrapper = self._wrapper
        if wrapper.device_ids:
            moved, named = wrapper.to_kwargs(inputs, kwargs, wrapper.device_ids[0])
            inputs, kwargs = moved[0], named[0]
        return wrapper.module(*inputs, **kwargs)


@contextmanager
def _preserve_grads(model: nn.Module) -> Iterator[None]:
    saved = [(param, param.grad) for param in model.parameters()]
    try:
        # So that a closure that runs backward or clears gradients cannot change them.
        for param, _ in saved:
            param.grad = None
        yield
    finally:
        for param, grad in saved:
            param.grad = grad


@contextmanager
def _force_eager() -> Iterator[None]:
    # Importing torch._dynamo takes seconds; without it nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # Nothing compiled runs here, so the warning about global hooks is void.
        warnings.filterwarnings("ignore", message=".*when there are global hooks")
        yield


class WeightBackup:
    """Restores the weights that a pass writes to or assigns.

    Tensors that modules hold as attributes or in containers are restored too. A weight
    is copied before the first write to it: a copy of all weights would double the
    memory, and few models write to any. Assignments to `.data` call no operation, so
    they are detected at the end.
    """

    def __init__(self, model: nn.Module) -> None:
        held = plain_tensors([module.__dict__ for module in model.modules()])
        # An inference tensor has no version.
        held = [each for each in held if not each.is_inference()]
        weights = {id(each): each for each in (*model.parameters(), *held)}.values()
        # Each with its memory, which an assignment to `.data` exchanges.
        self._plain = [(weight, weight.data) for weight in weights if is_plain(weight)]
        memory = {id(weight): data for weight, data in self._plain}
        # Several weights may share a storage.
        self._unwritten: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for weight in weights:
            here = self._unwritten.setdefault(storage_address(weight), [])
            here.append((weight, memory.get(id(weight), weight)))
        self._saved: list[tuple[Tensor, Tensor, Any]] = []

    def before_write(self, tensor: Tensor) -> None:
        """Copy the weights that share the storage of `tensor`, unless done before."""
        for weight, memory in self._unwritten.pop(storage_address(tensor), []):
            version = torch.autograd._unsafe_preserve_version_counter(weight)
            self._saved.append((memory, memory.detach().clone(), version))

    def restore(self) -> None:
        """Assign the former memory, and write saved values and versions back."""
        for weight, memory in self._plain:
            if not _same_memory(weight, memory):
                weight.data = memory
        for memory, value, version in self._saved:
            with torch.no_grad(), version:
                memory.copy_(value)
        self._plain, self._saved = [], []


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (
        is_plain(a)
        and a.data_ptr() == b.data_ptr()
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    )


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()
