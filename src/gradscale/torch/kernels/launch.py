"""Launches compiled kernels without binding and inspecting each argument every time.

Triton does both in every launch, which takes longer than a small kernel runs. Here the
compiled kernel is kept and launched directly, as in Triton's own tutorial on the fused
softmax; launch metadata are made only where a launch hook is installed.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from gradscale.errors import GradscaleWarning

_DTYPE = attrgetter("dtype")
# The maximum number of launchers kept per kernel; a run has fewer table sizes.
LAUNCHERS = 64
_LARGEST_I32 = 2**31 - 1
# Attributes of a compiled kernel, and of Triton's settings: its launch hooks.
_PARTS = "run", "function", "packed_metadata"
_CHAINS = "launch_enter_hook", "launch_exit_hook"

_direct = True
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def launched(**options: Any) -> Callable[[Callable[..., None]], "Launch"]:
    """Return a decorator that makes a function in Triton's language a `Launch`.

    Args:
        options: Compile options, such as `num_warps`.
    """
    return lambda body: Launch(body, options)


class Launch:
    """Launches one kernel.

    Its arguments are pointers, then numbers, then constants. Triton specialises on the
    constants only: it compiles once for each device, dtypes of the pointers, widths of
    the numbers and values of the constants. These are the key of the kept launchers.
    Changes of Triton's settings after the first launch have no effect, except for its
    launch hooks.

    Attributes:
        body: The kernel's function.
    """

    def __init__(self, body: Callable[..., None], options: dict[str, Any]) -> None:
        self.body = body
        found = inspect.signature(body).parameters.values()
        self._constants = [p.name for p in found if p.annotation is tl.constexpr]
        others = [p.name for p in found if p.annotation is not tl.constexpr]
        self._kernel = triton.jit(body, do_not_specialize=others)
        self._options = options
        self._launchers: dict[Any, Callable[..., None]] = {}

    def __call__(
        self,
        programs: int,
        pointers: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        **constants: Any,
    ) -> None:
        """Launch the kernel on the current device. No host sync.

        Args:
            programs: The number of programs.
            pointers: On that device; not empty.
            numbers: float, or int from 0 up.
            constants: In the order of the kernel. Each always of one type, since 1 and
                True are the same key.
        """
        values = constants.values()
        key = programs, *key_of(pointers, numbers, values)
        launch = self._launchers.get(key)
        if launch is not None and _direct:
            try:
                launch(*pointers, *numbers, *values, stream=_stream_of(pointers[0]))
                return
            except (AttributeError, TypeError) as error:
                # Raised by the call, before the kernel runs.
                _use_tritons_launcher(error)
        assert list(constants) == self._constants
        kernel = self._kernel[(programs,)]
        made = kernel(*pointers, *numbers, **constants, **self._options)
        # The interpreter returns none.
        if isinstance(made, CompiledKernel) and _direct:
            self._keep(key, programs, made)

    def _keep(self, key: Any, programs: int, made: CompiledKernel) -> None:
        if len(self._launchers) >= LAUNCHERS:
            self._launchers.clear()
        try:
            self._launchers[key] = _launcher_of(made, programs)
        except (AttributeError, TypeError) as error:
            # Not raised: the kernel was launched.
            _use_tritons_launcher(error)


def _launcher_of(made: Any, programs: int) -> Callable[..., None]:
    """Return a function that launches a compiled kernel with this many programs.

    Triton's own launcher makes metadata and calls two chains of hooks, also empty ones:
    a third of the time of a launch.
    """
    hooked = made[programs, 1, 1]
    parts: list[Any] = [getattr(made, name, None) for name in _PARTS]
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    chains: list[Any] = [getattr(runtime, name, None) for name in _CHAINS]
    if None in parts or not all(hasattr(chain, "calls") for chain in chains):
        return hooked
    (run, function, packed), (enter, leave) = parts, chains

    def launch(*args: Any, stream: Any) -> None:
        # A hook may have been assigned in place of a chain.
        no_hooks = (
            runtime.launch_enter_hook is enter
            and runtime.launch_exit_hook is leave
            and not (enter.calls or leave.calls)
        )
        if no_hooks and stream is not None:
            run(programs, 1, 1, stream, function, packed, None, None, None, *args)
        else:
            hooked(*args, stream=stream)

    return launch


def _stream_of(pointer: Tensor) -> Any:
    """Return the handle of the current stream; None to let Triton look it up.

    Triton's own look-up takes ten times as long.
    """
    index = pointer.get_device()
    return None if index < 0 or _raw_stream is None else _raw_stream(index)


def key_of(
    pointers: tuple[Tensor, ...], numbers: tuple[float, ...], constants: Iterable[Any]
) -> tuple[Any, ...]:
    """Return the key of a compiled kernel; its options are fixed by the `Launch`."""
    return (
        pointers[0].get_device(),
        *map(_DTYPE, pointers),
        # Whether an int is an i64; floats are always f32.
        *[None if type(n) is float else n > _LARGEST_I32 for n in numbers],
        *constants,
    )


def _use_tritons_launcher(error: Exception) -> None:
    """Launch all kernels by Triton's own launcher from now on; warn once."""
    global _direct
    if _direct:
        _direct = False
        warnings.warn(
            GradscaleWarning(
                f"Triton {triton.__version__} does not launch a compiled kernel as "
                f"expected ({type(error).__name__}: {error}). Its own launcher is used "
                "from now on: the results are the same, and each launch takes the host "
                "some microseconds more. Update gradscale, or ignore this warning.",
                code="GS110",
            ),
            stacklevel=4,
        )


def probe_(out: Tensor) -> None:
    """Write 1 into f32[1], to find out whether kernels compile and launch here."""
    _probe(1, (out,), (), VALUE=1)


@launched(num_warps=1, enable_fp_fusion=True)
def _probe(out_ptr, VALUE: tl.constexpr):
    tl.store(out_ptr, VALUE)
