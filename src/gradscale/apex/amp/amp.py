"""Enables O1's casts, and registers further functions in their lists."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gradscale.apex.amp._amp_state import _amp_state
from gradscale.apex.amp.casts import Casts, Rule, promote, to_float
from gradscale.apex.amp.handle import AmpHandle, NoOpHandle
from gradscale.errors import AmpError

F = TypeVar("F", bound=Callable[..., Any])
# Creates the rule of a function from the active casts.
MakeRule = Callable[[Casts], Rule]
_registered: dict[tuple[Any, str], MakeRule] = {}


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    on_cpu: bool | None = None,
) -> AmpHandle | NoOpHandle:
    """Switch the casts of O1 on for the whole process; `initialize` calls it.

    Casts that are on already are replaced, not nested.

    >>> handle = init(on_cpu=True)
    >>> torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
    torch.float16
    >>> handle._deactivate()
    >>> torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
    torch.float32

    Args:
        enabled: False for a handle that does nothing.
        loss_scale: Has no effect, as in apex; scales are those of `initialize`.
        enable_caching: Cast a parameter once until the next `scale_loss`.
        verbose: Has no effect.
        allow_banned: Cast the inputs of `binary_cross_entropy` to f32 instead of
            refusing float16.
        on_cpu: Cast tensors on the CPU too; None to do so where there is no
            accelerator.
    """
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return _amp_state.handle
    handle = AmpHandle(
        enable_caching=enable_caching,
        allow_banned=allow_banned,
        on_cpu=not torch.accelerator.is_available() if on_cpu is None else on_cpu,
    )
    _amp_state.handle = handle
    for (module, name), make_rule in _registered.items():
        _cast(handle, module, name, make_rule)
    handle.activate()
    return handle


def _cast(handle: AmpHandle, module: Any, name: str, make_rule: MakeRule) -> None:
    func = getattr(module, name)
    if module in (torch, torch.Tensor, torch.nn.functional):
        handle.casts.add_rule(func, make_rule(handle.casts))
    else:
        handle.replace(module, name, _wrapped(func, make_rule))


def _wrapped(func: F, make_rule: MakeRule) -> F:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if (
            handle is None
            or not handle.is_active()
            or not handle.casts.apply_to(args, kwargs)
        ):
            return func(*args, **kwargs)
        cast_args, cast_kwargs = make_rule(handle.casts)(list(args), dict(kwargs))
        return func(*cast_args, **cast_kwargs)

    return wrapper  # type: ignore[return-value]  # the same signature


def _half(casts: Casts) -> Rule:
    return casts.to_half


def _float(_: Casts) -> Rule:
    return to_float


def _promote(_: Casts) -> Rule:
    return promote


def half_function(fn: F) -> F:
    """Decorate a function so that O1 casts its arguments to half.

    >>> @half_function
    ... def dtype_of(x):
    ...     return x.dtype
    >>> handle = init(on_cpu=True)
    >>> dtype_of(torch.ones(1))
    torch.float16
    >>> handle._deactivate()
    >>> dtype_of(torch.ones(1))
    torch.float32
    """
    return _wrapped(fn, _half)


def float_function(fn: F) -> F:
    """Decorate a function so that O1 casts its half-precision arguments to f32."""
    return _wrapped(fn, _float)


def promote_function(fn: F) -> F:
    """Decorate a function so that O1 casts its arguments to the widest of them."""
    return _wrapped(fn, _promote)


def register_half_function(module: Any, name: str) -> None:
    """Make O1 cast the arguments of `module.name` to half; call before `initialize`.

    Args:
        module: A module or a class.
        name: Of the function. Functions of torch are cast by the mode; others are
            replaced in their module until the casts are switched off.
    """
    _register(module, name, _half)


def register_float_function(module: Any, name: str) -> None:
    """Make O1 cast the half-precision arguments of `module.name` to f32."""
    _register(module, name, _float)


def register_promote_function(module: Any, name: str) -> None:
    """Make O1 cast the arguments of `module.name` to the widest of them."""
    _register(module, name, _promote)


def _register(module: Any, name: str, make_rule: MakeRule) -> None:
    if not hasattr(module, name):
        raise AmpError(
            f"{module!r} has no function {name!r}. There is nothing to cast. Register "
            "a function under the name by which it is called.",
            code="GS101",
        )
    _registered[module, name] = make_rule
