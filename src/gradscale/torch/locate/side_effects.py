"""Running a model without leaving a trace in it."""

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# What a module keeps in dictionaries of its own, beside its plain attributes.
NestedState = dict[str, dict[Any, Any]]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back, on leaving, all that a forward and backward pass changes.

    Random numbers (torch's on all devices, Python's, NumPy's if it is loaded), the
    attributes, buffers, hooks and flags of every module, and the `.grad` of every
    parameter. Compiled modules run without their compiled code, and
    `DistributedDataParallel` runs without its reducer, so that no collective is
    called. Weights are left to `Replay`, which sees who writes to them.
    """
    with ExitStack() as stack:
        stack.enter_context(_same_random_numbers())
        stack.enter_context(_same_modules(model))
        stack.enter_context(_same_gradients(model))
        stack.enter_context(_uncompiled())
        yield


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    devices = _devices_with_random_numbers()
    states = [(module, module.get_rng_state(index)) for module, index in devices]
    host, python = torch.get_rng_state(), random.getstate()
    # Loaded or not: this room does not import it.
    numpy = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        for (module, state), (_, index) in zip(states, devices, strict=True):
            module.set_rng_state(state, index)
        torch.set_rng_state(host)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpys)


def _devices_with_random_numbers() -> list[tuple[Any, int]]:
    """Return the module and index of every accelerator that is in use."""
    found = []
    for module in (torch.cuda, torch.xpu):
        if module.is_available() and module.is_initialized():
            found += [(module, index) for index in range(module.device_count())]
    return found


@contextmanager
def _same_modules(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    scripted = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]
    plain = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    kept = [(module, dict(module.__dict__), _nested(module)) for module in plain]
    # Scripted modules hold their buffers elsewhere; these are written back.
    values = [(b, b.clone()) for m in scripted for b in m.buffers(recurse=False)]
    _lend_buffers(plain)
    _bypass_reducers(plain)
    try:
        yield
    finally:
        for module, attributes, nested in kept:
            for name, content in nested.items():
                # Handles of hooks point to the very dictionary.
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


def _lend_buffers(modules: list[nn.Module]) -> None:
    """Let the modules work on copies of their buffers."""
    copies: dict[int, Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                # Two modules may share one.
                copy = copies.setdefault(id(buffer), buffer.detach().clone())
                module._buffers[name] = copy


def _bypass_reducers(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module.__dict__["forward"] = _Alone(module)


class _Alone:
    """The forward pass of a `DistributedDataParallel` as if there were one rank."""

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        wrapper = self._wrapper
        if wrapper.device_ids:
            moved, named = wrapper.to_kwargs(inputs, kwargs, wrapper.device_ids[0])
            inputs, kwargs = moved[0], named[0]
        return wrapper.module(*inputs, **kwargs)


@contextmanager
def _same_gradients(model: nn.Module) -> Iterator[None]:
    kept = [(param, param.grad) for param in model.parameters()]
    try:
        # A closure that runs backward itself, or clears gradients, meets none.
        for param, _ in kept:
            param.grad = None
        yield
    finally:
        for param, grad in kept:
            param.grad = grad


@contextmanager
def _uncompiled() -> Iterator[None]:
    # Importing it costs seconds, so only where something may be compiled already.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # Said of our hooks, which nothing compiled will meet.
        warnings.filterwarnings("ignore", message=".*when there are global hooks")
        yield


class WrittenWeights:
    """Keeps the old values of weights that a pass writes to.

    A copy of all weights would double the memory; few models write to them, and only
    what is written is copied.
    """

    def __init__(self, model: nn.Module) -> None:
        # Several weights may be parts of one piece of memory.
        self._held: dict[int, list[Tensor]] = {}
        for param in model.parameters():
            self._held.setdefault(place_of(param), []).append(param)
        self._old: list[tuple[Tensor, Tensor, Any]] = []

    def about_to_write(self, tensor: Tensor) -> None:
        """Keep what is there, if it is a weight that was not written to before."""
        for weight in self._held.pop(place_of(tensor), []):
            version = torch.autograd._unsafe_preserve_version_counter(weight)
            self._old.append((weight, weight.detach().clone(), version))

    def put_back(self) -> None:
        """Write the old values and the old versions."""
        for weight, value, version in self._old:
            with torch.no_grad(), version:
                weight.copy_(value)
        self._old = []


def place_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor and its views lie in."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()
