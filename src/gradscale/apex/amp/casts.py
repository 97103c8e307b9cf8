"""O1: casts around torch's functions, by apex's lists, as a `TorchFunctionMode`.

Torch itself is not changed: the mode is entered by `init` and removed by
`AmpHandle._deactivate`.
"""

import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from gradscale.apex.amp._amp_state import _amp_state
from gradscale.apex.amp.lists import (
    functional_overrides,
    tensor_overrides,
    torch_overrides,
)
from gradscale.errors import AmpError

HALF, FLOAT = torch.float16, torch.float32
# Maps the arguments of a call to those that the function receives.
Rule = Callable[[list[Any], dict[str, Any]], tuple[Any, Any]]


class Casts(TorchFunctionMode):
    """Casts the arguments of torch's functions.

    Attributes:
        cache: Half-precision copies of f32 parameters.
        is_active: False to pass all arguments through.
        on_cpu: Cast tensors on the CPU too. With a model on a GPU, those are input
            data that have not been moved yet.
    """

    def __init__(self, *, caching: bool, allow_banned: bool, on_cpu: bool) -> None:
        super().__init__()
        self.on_cpu = on_cpu
        self.cache = CastCache(caching)
        self.is_active = True
        self._rules = self._make_rules(allow_banned)
        self._bodies: dict[Any, Callable[..., Any]] = {}

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function with its arguments cast."""
        kwargs = kwargs or {}
        if not self.is_active:
            return func(*args, **kwargs)
        rule = self._rules.get(func)
        if rule is not None and self.apply_to(args, kwargs):
            args, kwargs = rule(list(args), dict(kwargs))
        if not _calls_others(func):
            return func(*args, **kwargs)
        # Python functions, such as attention and backward, call others to be cast.
        body = self._bodies.get(func)
        if body is None:
            body = self._bodies[func] = _undispatched(func)
        with self:
            return body(*args, **kwargs)

    def apply_to(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether a call is cast, by the devices of its tensors."""
        return self.on_cpu or _any_off_cpu((*args, *kwargs.values()))

    def add_rule(self, func: Any, rule: Rule) -> None:
        """Cast the arguments of a further function."""
        self._rules[func] = rule

    def to_half(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cast to half, parameters through the cache."""
        return _cast_arguments(self.cache.half, args, kwargs)

    def remove(self) -> None:
        """Remove the mode from any position in the stack of modes."""
        above = []
        while torch._C._len_torch_function_stack() > 0:
            mode = _pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def _make_rules(self, allow_banned: bool) -> dict[Any, Rule]:
        rules: dict[Any, Rule] = {}

        def add(module: Any, names: Iterable[str], rule: Rule) -> None:
            rules.update(
                (getattr(module, name), rule) for name in names if hasattr(module, name)
            )

        def in_place(names: Iterable[str]) -> list[str]:
            return [f"{name}_" for name in names]

        # Later entries win, as later patches do in apex.
        functional, tensor = functional_overrides, tensor_overrides
        for module in (functional, torch_overrides, tensor):
            add(module.MODULE, module.FP16_FUNCS, self.to_half)
            add(module.MODULE, module.FP32_FUNCS, to_float)
        for module in (torch_overrides, tensor):
            add(module.MODULE, module.CASTS, promote)
            add(module.MODULE, module.SEQUENCE_CASTS, promote)
        names = in_place(torch_overrides.FP32_FUNCS)
        add(torch, names, refuse_half("an in-place function"))
        for name in in_place(tensor.FP32_FUNCS):
            add(torch.Tensor, [name], _refuse_half_self(name))
        add(torch.Tensor, ["__ipow__"], _refuse_half_self("__ipow__"))
        add(torch.Tensor, in_place([*tensor.FP16_FUNCS, *tensor.CASTS]), match_self)
        add(torch, torch_overrides.RNN_FUNCS, self.to_half)
        for name, message in functional.BANNED_FUNCS:
            rule = to_float if allow_banned else _or_float(refuse_half(name, message))
            add(functional.MODULE, [name], rule)
        return rules


# Python modules of torch whose functions first dispatch to the active modes. Further
# methods: backward passes run user code, `1 / x` calls `reciprocal`.
_IN_PYTHON = ("torch.nn.functional", "torch.functional", "torch.autograd")
_METHODS_IN_PYTHON = (Tensor.backward, Tensor.__rdiv__)
_CHECKS = {
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
}


class CastCache:
    """Half-precision copies of parameters, each made once until the cache is cleared.

    A copy is renewed if the parameter was written since, or if only one of the two
    requires grad, as after the weight was (un)frozen. While gradients are disabled, no
    copy is kept or used: an evaluation may swap weights through `.data`, which leaves
    no trace.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._copies: dict[int, tuple[Any, int, int, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()

    def half(self, tensor: Tensor) -> Tensor:
        """Return a tensor in half precision."""
        if tensor.dtype is HALF or not tensor.is_floating_point():
            return tensor
        cached = self.enabled and torch.is_grad_enabled()
        if not (cached and isinstance(tensor, torch.nn.Parameter)):
            return tensor.to(HALF)
        key = id(tensor)
        address, version = tensor.data_ptr(), tensor._version
        if key in self._copies:
            owner, *before, copy = self._copies[key]
            connected = copy.requires_grad == tensor.requires_grad
            if owner() is tensor and before == [address, version] and connected:
                return copy
        copy = tensor.to(HALF)
        self._copies[key] = weakref.ref(tensor), address, version, copy
        return copy


def cast_nested(cast: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Cast the floating tensors in a nest of tuples and lists."""
    if isinstance(value, Tensor):
        return cast(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_nested(cast, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(cast_nested(cast, item) for item in value)
    return value


def _cast_arguments(
    cast: Callable[[Tensor], Tensor], args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    new = {name: cast_nested(cast, value) for name, value in kwargs.items()}
    return [cast_nested(cast, value) for value in args], new


def to_float(args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast half precision to f32."""
    return _cast_arguments(_float, args, kwargs)


def promote(args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast to f32 if the arguments mix f32 and half precision."""
    if {HALF, FLOAT} <= dtypes_in((args, list(kwargs.values()))):
        return to_float(args, kwargs)
    return args, kwargs


def match_self(args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast to the dtype of the first argument, which is written in place."""
    own = args[0].dtype
    if own not in (HALF, FLOAT):
        return args, kwargs
    rest, new = _cast_arguments(lambda t: _between(t, own), args[1:], kwargs)
    return [args[0], *rest], new


def refuse_half(what: str, message: str = "") -> Rule:
    """Return a rule that raises if an argument is in half precision."""
    text = message or (
        f"{what} was given float16. It is on apex's list of float32, and an in-place "
        "result cannot change its dtype. Use the function that returns a new tensor."
    )

    def rule(args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if HALF in dtypes_in((args, list(kwargs.values()))):
            raise AmpError(text, code="GS101")
        return args, kwargs

    return rule


def _refuse_half_self(name: str) -> Rule:
    refuse = refuse_half(f"Tensor.{name}")

    def rule(args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        refuse(args[:1], {})
        rest, new = to_float(args[1:], kwargs)
        return [args[0], *rest], new

    return rule


def _or_float(refuse: Rule) -> Rule:
    return lambda args, kwargs: to_float(*refuse(args, kwargs))


def dtypes_in(value: Any) -> set[torch.dtype]:
    """Return the dtypes of the floating tensors in a nest of tuples and lists."""
    if isinstance(value, Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    if isinstance(value, (tuple, list)):
        return set().union(*map(dtypes_in, value)) if value else set()
    return set()


def _any_off_cpu(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type != "cpu"
    return isinstance(value, (tuple, list)) and any(map(_any_off_cpu, value))


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is HALF else tensor


def _between(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in (HALF, FLOAT) else tensor


class _Globals(dict[str, Any]):
    """The globals of a function, with some names replaced."""

    def __init__(self, behind: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(replaced)
        self._behind = behind

    def __missing__(self, name: str) -> Any:
        return self._behind[name]


def _calls_others(func: Any) -> bool:
    """Return whether a function is Python code that may call functions of the lists.

    Pooling, `unique`, `lu` and `meshgrid` dispatch in a function behind them, so the
    check cannot be left out. They call no function of the lists.
    """
    if not isinstance(func, types.FunctionType):
        return False
    if func.__module__ not in _IN_PYTHON and func not in _METHODS_IN_PYTHON:
        return False
    return not _CHECKS.isdisjoint(func.__code__.co_names)


def _undispatched(func: Any) -> Callable[..., Any]:
    """Return a function without its initial dispatch, which would recurse."""
    replaced = dict.fromkeys(_CHECKS, _never)
    body = types.FunctionType(
        func.__code__,
        _Globals(func.__globals__, replaced),
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _never(*_: Any) -> bool:
    return False


class OtherThreads:
    """Enters the casts for forward passes in other threads, as in `DataParallel`.

    Torch's stack of modes is per thread. A backward pass uses that of the thread that
    started it.
    """

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self._home = threading.get_ident()
        # The outermost module, and its recursion depth.
        self._local = threading.local()

    def begin_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Enter the casts before the outermost module of another thread runs."""
        if threading.get_ident() == self._home:
            return
        local = self._local
        if getattr(local, "module", None) is module:
            local.depth += 1
        elif self._casts not in _get_current_function_mode_stack():
            local.module, local.depth = module, 1
            self._casts.__enter__()

    def end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Leave them after it has run, or raised."""
        local = self._local
        if getattr(local, "module", None) is not module:
            return
        local.depth -= 1
        if local.depth == 0:
            local.module = None
            self._casts.__exit__(None, None, None)


def rnn_inputs_as_weights(module: torch.nn.Module, args: Any) -> Any:
    """Cast the inputs of a recurrent network to the dtype of its weights.

    A forward pre-hook: torch refuses other inputs before any function is called. The
    casts that follow make all of them half.
    """
    casts = getattr(_amp_state.handle, "casts", None)
    if not isinstance(module, torch.nn.RNNBase) or casts is None or not casts.is_active:
        return None
    weight = next(module.parameters())
    dtype = weight.dtype
    if not casts.apply_to((weight,), {}):
        return None

    def cast(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value.to(dtype)
        return cast_nested(lambda t: _between(t, dtype), value)

    return tuple(map(cast, args))


@contextmanager
def disable_casts() -> Iterator[None]:
    """Pass all arguments through inside the block.

    >>> with disable_casts():
    ...     pass
    """
    casts = getattr(_amp_state.handle, "casts", None)
    if casts is None:
        yield
        return
    before, casts.is_active = casts.is_active, False
    try:
        yield
    finally:
        casts.is_active = before
