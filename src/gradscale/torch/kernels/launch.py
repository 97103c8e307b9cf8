"""Starting a kernel without binding and inspecting each argument every time.

Triton does both in every launch, which takes longer than a small kernel runs. Here the
compiled kernel is kept and started directly, as Triton's own tutorial on the fused
softmax does it; and where nobody listens to launches, nothing is made up for listeners.
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
# Starts that are kept for one kernel; more than any run has tables of other sizes.
STARTS = 64
_LARGEST_I32 = 2**31 - 1
# Of a compiled kernel, and of Triton's settings: what hears of launches.
_PARTS = "run", "function", "packed_metadata"
_CHAINS = "launch_enter_hook", "launch_exit_hook"

_direct = True
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def launched(**options: Any) -> Callable[[Callable[..., None]], "Launch"]:
    """Make a function in Triton's language a kernel to be launched.

    Args:
        options: How it is compiled, such as `num_warps`.
    """
    return lambda body: Launch(body, options)


class Launch:
    """Starts one kernel.

    Its arguments are pointers, then numbers, then constants. Triton is told to
    specialise on none but the constants: it compiles once for each device, dtypes of
    the pointers, widths of the numbers and constants, and for nothing else. These are
    the key of what is kept. Settings of Triton that change after the first launch are
    not seen, its launch hooks are.

    Attributes:
        body: The kernel as it is written.
    """

    def __init__(self, body: Callable[..., None], options: dict[str, Any]) -> None:
        self.body = body
        found = inspect.signature(body).parameters.values()
        self._constants = [p.name for p in found if p.annotation is tl.constexpr]
        others = [p.name for p in found if p.annotation is not tl.constexpr]
        self._kernel = triton.jit(body, do_not_specialize=others)
        self._options = options
        self._starts: dict[Any, Callable[..., None]] = {}

    def __call__(
        self,
        programs: int,
        pointers: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        **constants: Any,
    ) -> None:
        """Launch the kernel on the current device. No host sync.

        Args:
            programs: How many there are to be.
            pointers: On that device; not empty.
            numbers: float, or int from 0 up.
            constants: In the order of the kernel. At each place of one type alone, for
                1 and True are the same key.
        """
        values = constants.values()
        key = programs, *key_of(pointers, numbers, values)
        start = self._starts.get(key)
        if start is not None and _direct:
            try:
                start(*pointers, *numbers, *values, stream=_stream_of(pointers[0]))
                return
            except (AttributeError, TypeError) as error:
                # Before anything ran: these are about the call, not the kernel.
                _launch_as_triton_does(error)
        assert list(constants) == self._constants
        kernel = self._kernel[(programs,)]
        made = kernel(*pointers, *numbers, **constants, **self._options)
        # The interpreter makes none.
        if isinstance(made, CompiledKernel) and _direct:
            self._keep(key, programs, made)

    def _keep(self, key: Any, programs: int, made: CompiledKernel) -> None:
        if len(self._starts) >= STARTS:
            self._starts.clear()
        try:
            self._starts[key] = _start_of(made, programs)
        except (AttributeError, TypeError) as error:
            # Not to be raised: the kernel was launched.
            _launch_as_triton_does(error)


def _start_of(made: Any, programs: int) -> Callable[..., None]:
    """Return what starts a compiled kernel on so many programs.

    Triton's own way makes up metadata and calls two chains of hooks, empty or not: a
    third of a launch.
    """
    heard = made[programs, 1, 1]
    parts: list[Any] = [getattr(made, name, None) for name in _PARTS]
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    chains: list[Any] = [getattr(runtime, name, None) for name in _CHAINS]
    if None in parts or not all(hasattr(chain, "calls") for chain in chains):
        return heard
    (run, function, packed), (enter, leave) = parts, chains

    def start(*args: Any, stream: Any) -> None:
        # Somebody may have put another hook in the place of a chain.
        unheard = (
            runtime.launch_enter_hook is enter
            and runtime.launch_exit_hook is leave
            and not (enter.calls or leave.calls)
        )
        if unheard and stream is not None:
            run(programs, 1, 1, stream, function, packed, None, None, None, *args)
        else:
            heard(*args, stream=stream)

    return start


def _stream_of(pointer: Tensor) -> Any:
    """Return the current stream as Triton wants it; None to let Triton ask for it.

    Triton's own way is ten times as long.
    """
    index = pointer.get_device()
    return None if index < 0 or _raw_stream is None else _raw_stream(index)


def key_of(
    pointers: tuple[Tensor, ...], numbers: tuple[float, ...], constants: Iterable[Any]
) -> tuple[Any, ...]:
    """Return what a compiled kernel is for; the options belong to the kernel itself."""
    return (
        pointers[0].get_device(),
        *map(_DTYPE, pointers),
        # Whether an int is an i64; floats are always f32.
        *[None if type(n) is float else n > _LARGEST_I32 for n in numbers],
        *constants,
    )


def _launch_as_triton_does(error: Exception) -> None:
    """Start no kernel directly any more; say so once, with the reason."""
    global _direct
    if _direct:
        _direct = False
        warnings.warn(
            GradscaleWarning(
                f"Triton {triton.__version__} does not start a compiled kernel as was "
                f"expected ({type(error).__name__}: {error}). Its own way is taken "
                "from here on: the results are the same, and each launch costs the "
                "host some microseconds more. Update gradscale, or leave it so.",
                code="GS110",
            ),
            stacklevel=4,
        )


def probe_(out: Tensor) -> None:
    """Write 1 into f32[1], to find out whether kernels compile and launch here."""
    _probe(1, (out,), (), VALUE=1)


@launched(num_warps=1)
def _probe(out_ptr, VALUE: tl.constexpr):
    tl.store(out_ptr, VALUE)
