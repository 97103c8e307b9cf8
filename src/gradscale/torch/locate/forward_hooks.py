"""Forward hooks on the modules of one model that neither end nor change a run."""

import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.torch.devices import can_touch_host
from gradscale.torch.locate.module_tracker import ModuleName, in_backward

T = TypeVar("T")

# Subclasses of tensors have rules of their own: a DTensor may call a collective.
PLAIN = (Tensor, nn.Parameter)
# A module with hooks takes one more frame of the stack. Recursive models may nest
# hundreds of modules, and Python's limit is 1000 frames.
MAX_NESTING = 32


class ForwardHooks:
    """Calls functions around the forward passes of a model's modules.

    They are called in training only: in the thread that ends the steps or in a backward
    pass, with gradients enabled and the model in training mode, while nothing traces,
    compiles, captures, transforms or intercepts operations. An evaluation removes the
    hooks, and the next step registers them again. Copies and pickles of modules run as
    without hooks. No module is kept alive.

    Args:
        before: Called with the name and the inputs of a module.
        after: Called with the name and the outputs of a module, None if it raised.

    Attributes:
        failure: The first exception inside the functions, in words. It removes the
            hooks for good.
    """

    def __init__(
        self,
        before: Callable[[ModuleName, Any], None],
        after: Callable[[ModuleName, Any], None],
    ) -> None:
        self.failure: str | None = None
        self._before, self._after = before, after
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._handles: list[RemovableHandle] = []
        self._suspended = False
        # Each with whether `before` was called.
        self._running: list[tuple[_ModuleHook, bool]] = []
        self._thread = threading.get_ident()

    @property
    def registered(self) -> bool:
        """Whether the modules have hooks."""
        return bool(self._handles)

    def register(self, model: nn.Module) -> bool:
        """Register the hooks, unless they failed before or the model is compiled.

        A compiled model would be recompiled with the hooks, and again without them. The
        calling thread is taken for the training thread.

        Returns:
            Whether the hooks are registered.
        """
        if not self.registered and self.failure is None:
            self.guarded(self._register, model)
        return self.registered

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._running = [], []
        self._suspended = False

    def begin_step(self) -> None:
        """Drop the running modules; the calling thread is the training thread."""
        self._running = []
        self._thread = threading.get_ident()
        model = self._model()
        if self._suspended and model is not None:
            self._suspended = False
            self.register(model)

    def guarded(self, function: Callable[..., T], *args: Any) -> T | None:
        """Call a function unless an earlier call failed; return None on failure."""
        if self.failure is not None:
            return None
        try:
            # Function modes of the user do not see the hooks' own operations.
            with torch._C.DisableTorchFunction():
                return function(*args)
        except Exception as error:
            # Broad on purpose: the hooks run inside the user's forward and backward
            # pass, on outputs of any class. Whatever fails here must not end the run.
            self.failure = "".join(traceback.format_exception_only(error)).strip()
            self.remove()
            return None

    def call(self, hook: "_ModuleHook", passed: tuple[Any, ...]) -> None:
        """Call the functions for one module.

        Args:
            hook: The hook of the module.
            passed: Its inputs; after its forward pass, its outputs too.
        """
        if threading.get_ident() == self._thread or in_backward():
            self.guarded(self._enter if len(passed) == 1 else self._leave, hook, passed)

    def _register(self, model: nn.Module) -> None:
        modules = list(model.named_modules())
        if any(is_compiled(module) for _, module in modules):
            return
        self.begin_step()
        self._model = weakref.ref(model)
        for name, module in modules:
            # A scripted module runs its parts outside Python.
            if not isinstance(module, torch.jit.ScriptModule):
                hook = _ModuleHook(self, module, name)
                before = module.register_forward_pre_hook(hook)
                self._handles.append(before)
                after = module.register_forward_hook(hook, always_call=True)
                self._handles.append(after)

    def _enter(self, hook: "_ModuleHook", passed: tuple[Any, ...]) -> None:
        model = self._model()
        if not self._running and model is not None and not model.training:
            # An evaluation: some modules choose another kernel if they have hooks.
            self.remove()
            self._suspended = True
            return
        training = self._in_training()
        self._running.append((hook, training))
        if len(self._running) > MAX_NESTING:
            raise RecursionError(f"modules are nested more than {MAX_NESTING} deep")
        if training:
            self._before(hook.name, passed[0])

    def _leave(self, hook: "_ModuleHook", passed: tuple[Any, ...]) -> None:
        if all(running is not hook for running, _ in self._running):
            return
        training = self._in_training()
        while True:
            # Modules that an interrupt left open end with the one that called them.
            running, entered = self._running.pop()
            own = running is hook
            if entered:
                self._after(running.name, passed[1] if own and training else None)
            if own:
                return

    def _in_training(self) -> bool:
        model = self._model()
        return (
            model is not None
            and model.training
            and torch.is_grad_enabled()
            and is_plain_eager()
        )


class _ModuleHook:
    """The hooks of one module, before and after its forward pass."""

    def __init__(self, hooks: ForwardHooks, module: nn.Module, name: str) -> None:
        self.name = ModuleName(name, type(module).__name__)
        self._hooks = hooks
        self._module = weakref.ref(module)

    def __call__(self, module: nn.Module, *passed: Any) -> None:
        # First and alone: torch.compile traces this line and leaves out the others.
        if torch.compiler.is_compiling():
            return
        # A replica shares the dictionary of hooks with its module.
        if module is self._module():
            self._hooks.call(self, passed)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of the module gets a function of the standard library
        # that takes any arguments and does nothing.
        return getattr, (nullcontext(), "__exit__")


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was called on the module itself."""
    wrapped = type(module).__name__ == "OptimizedModule"
    return wrapped or module._compiled_call_impl is not None


def is_plain_eager() -> bool:
    """Return whether operations run eagerly and nothing else observes them.

    False while a graph is compiled, captured or traced, in transforms of `torch.func`,
    and in dispatch modes, such as those of fake tensors and selective checkpoints.
    """
    return (
        can_touch_host()
        and not torch._C._is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor with memory, not of a subclass."""
    return (
        type(value) in PLAIN
        and value.layout is torch.strided
        and not value.is_nested
        # Sharded weights free their memory between uses.
        and value.untyped_storage().size() > 0
    )


def plain_tensors(value: Any) -> list[Tensor]:
    """Return the plain tensors in tuples, lists, dicts and dataclasses, in order.

    Runs no code of the containers, and looks into no other objects.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Output:
    ...     logits: Tensor
    ...     names: list
    >>> [t.item() for t in plain_tensors({"a": Output(torch.ones(1), ["x"]), "b": 2})]
    [1.0]
    """
    found: list[Tensor] = []
    visited: set[int] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        if is_plain(each):
            found.append(each)
        elif id(each) not in visited:
            visited.add(id(each))
            stack += reversed(list(_inside(each)))
    return found


def _inside(value: Any) -> Iterable[Any]:
    """Return the elements of a container, by the methods of the built-in classes."""
    # `isinstance` may run code of the object.
    kind = type(value)
    if issubclass(kind, dict):
        return dict.values(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    if issubclass(kind, list):
        return list.__iter__(value)
    if is_dataclass(kind) and kind.__dictoffset__:
        return object.__getattribute__(value, "__dict__").values()
    return ()
