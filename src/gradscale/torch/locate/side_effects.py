"""Saves and restores everything that a forward and backward pass changes."""

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# The private dictionaries of a module: parameters, buffers, hooks.
NestedState = dict[str, dict[Any, Any]]


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore on exit all that a forward and backward pass changes, except weights.

    Restored are random number generators (torch's on all devices, Python's, NumPy's if
    it is loaded), the attributes, buffers, hooks and flags of every module, and the
    `.grad` of every parameter. Compiled modules run eagerly, and
    `DistributedDataParallel` runs without its reducer, so that no collective is
    called. `ReplayMode` restores the weights, because it sees each write.
    """
    with ExitStack() as stack:
        stack.enter_context(_preserve_rng())
        stack.enter_context(_preserve_modules(model))
        stack.enter_context(_preserve_grads(model))
        stack.enter_context(_force_eager())
        yield


@contextmanager
def _preserve_rng() -> Iterator[None]:
    devices = _devices_with_rng()
    states = [(module, module.get_rng_state(index)) for module, index in devices]
    host, python = torch.get_rng_state(), random.getstate()
    # Looked up, not imported: gradscale.torch does not depend on NumPy.
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        for (module, state), (_, index) in zip(states, devices, strict=True):
            module.set_rng_state(state, index)
        torch.set_rng_state(host)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _devices_with_rng() -> list[tuple[Any, int]]:
    """Return the module and index of every accelerator in use."""
    found = []
    for module in (torch.cuda, torch.xpu):
        if module.is_available() and module.is_initialized():
            found += [(module, index) for index in range(module.device_count())]
    return found


@contextmanager
def _preserve_modules(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    scripted = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]
    plain = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    saved = [(module, dict(module.__dict__), _nested(module)) for module in plain]
    # Scripted modules hold their buffers outside __dict__: values are written back.
    values = [(b, b.clone()) for m in scripted for b in m.buffers(recurse=False)]
    _copy_buffers(plain)
    _bypass_reducers(plain)
    try:
        yield
    finally:
        for module, attributes, nested in saved:
            for name, content in nested.items():
                # In place: handles of hooks refer to this very dictionary.
                attributes[name].clear()
                attributes[name].update(content)
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for buffer, value in values:
            with torch.no_grad():
                buffer.copy_(value)


def _nested(module: nn.Module) -> NestedState:
    return {
        name: dict(value)
        for name, value in module.__dict__.items()
        if name.startswith("_") and isinstance(value, dict)
    }


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
    """Copies of the weights that a pass writes to, made before the first write.

    A copy of all weights would double the memory; few models write to any.
    """

    def __init__(self, model: nn.Module) -> None:
        # Several weights may share a storage.
        self._unwritten: dict[int, list[Tensor]] = {}
        for param in model.parameters():
            self._unwritten.setdefault(storage_address(param), []).append(param)
        self._saved: list[tuple[Tensor, Tensor, Any]] = []

    def before_write(self, tensor: Tensor) -> None:
        """Copy the weights that share the storage of `tensor`, unless done before."""
        for weight in self._unwritten.pop(storage_address(tensor), []):
            version = torch.autograd._unsafe_preserve_version_counter(weight)
            self._saved.append((weight, weight.detach().clone(), version))

    def restore(self) -> None:
        """Write the saved values and versions back, in place."""
        for weight, value, version in self._saved:
            with torch.no_grad(), version:
                weight.copy_(value)
        self._saved = []


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()
