"""Triton kernels, each beside a plain reference; the one place that asks for Triton."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from gradscale.errors import ConfigError, GradscaleWarning

Kernels = Literal["auto", "plain", "triton"]

_broken: str | None = None
_here = nullcontext()


def interpreted() -> bool:
    """Return whether Triton runs its kernels in Python, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(kernels: Kernels, device: torch.device) -> bool:
    """Return whether Triton kernels are to run on this device.

    Args:
        kernels: "auto" takes them where they run, "plain" never, "triton" insists.
        device: Where the tensors are.

    Raises:
        ConfigError: Triton was asked for by name and cannot run there.
    """
    if kernels == "plain" or torch.compiler.is_compiling():
        return False
    if kernels == "auto":
        return device.type == "cuda" and _broken is None and _there()
    reason = _why_not(device)
    if reason is not None:
        raise ConfigError(
            f"kernels='triton' was asked for, and {reason}. They cannot run on "
            f"{device}. Pass kernels='auto', which uses plain PyTorch there.",
            code="GS101",
        )
    return True


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one: Triton starts kernels there and nowhere else."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _here
    return torch.cuda.device(device)


def fall_back(error: Exception, kernels: Kernels) -> None:
    """Let plain operations do the work of a kernel that failed.

    Raises:
        Exception: The error itself, where Triton was asked for by name or has nothing
            to do with it.
    """
    # A device without memory, or broken by an earlier kernel of somebody else.
    elsewhere = torch.OutOfMemoryError, torch.AcceleratorError
    if kernels == "triton" or isinstance(error, elsewhere):
        raise error
    give_up(error)


def give_up(error: Exception) -> None:
    """Note that Triton does not work here; say so once, with the reason."""
    global _broken
    if _broken is None:
        _broken = f"{type(error).__name__}: {error}"
        warnings.warn(
            GradscaleWarning(
                "Triton could not build or start a kernel, so plain PyTorch operations "
                "are used from here on; they compute the same and are slower. "
                f"{_broken} Pass kernels='plain' to choose them yourself.",
                code="GS110",
            ),
            stacklevel=4,
        )


@cache
def _there() -> bool:
    return find_spec("triton") is not None


def _why_not(device: torch.device) -> str | None:
    if not _there():
        return "Triton is not installed (pip install triton)"
    if _broken is not None:
        return f"Triton has failed before ({_broken})"
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return f"Triton has no kernels for {device.type}"
