"""Triton kernels beside plain references; decides where the kernels are used."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from gradscale.errors import ConfigError, GradscaleWarning

Kernels = Literal["auto", "plain", "triton"]

# For each device that was probed: why Triton does not work there, or None if it does.
_probed: dict[torch.device, str | None] = {}
_warned: set[torch.device] = set()
_current = nullcontext()


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(kernels: Kernels, device: torch.device) -> bool:
    """Return whether Triton kernels run on this device.

    The first call for a device compiles and launches a kernel of one element there; if
    that fails, plain operations are used on the device from then on, with one warning.
    Errors of later kernels are raised. No host sync.

    While a CUDA graph is being captured no kernel is compiled for a probe: on a device
    that was not probed before, "auto" gives False and "triton" gives True.

    Args:
        kernels: "auto" uses them on CUDA devices where they work, "plain" never;
            "triton" requires them, also in Triton's interpreter.
        device: The device of the tensors.

    Raises:
        ConfigError: `kernels` is "triton", and Triton does not work on the device.
    """
    if kernels == "plain" or torch.compiler.is_compiling():
        return False
    if kernels == "auto" and device.type != "cuda":
        return False
    reason = _unsupported(device)
    if reason is None:
        if device not in _probed:
            if capturing(device):
                return kernels == "triton"
            _probed[device] = _probe(device)
        reason = _probed[device]
        if reason is None:
            return True
        if kernels == "auto":
            _warn_once(device, reason)
    if kernels == "auto":
        return False
    raise ConfigError(
        f"kernels='triton' was passed, but {reason}. No kernel can run on {device}. "
        "Pass kernels='auto', which uses plain PyTorch operations there.",
        code="GS101",
    )


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one: Triton launches kernels only there."""
    index = device.index
    elsewhere = device.type == "cuda" and index is not None
    if elsewhere and index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _current


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on this device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _unsupported(device: torch.device) -> str | None:
    """Return why there are no kernels for the device, or None; launches nothing."""
    if not _installed():
        return "Triton is not installed (pip install triton)"
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return f"Triton has no kernels for {device.type}"


def _probe(device: torch.device) -> str | None:
    """Launch a kernel of one element; return why it failed, or None. No host sync."""
    try:
        from gradscale.torch.kernels.launch import probe_

        with on(device):
            probe_(torch.empty(1, dtype=torch.float32, device=device))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # Not caused by Triton: plain operations would fail too.
        raise
    except Exception as error:
        # A missing compiler, linker or driver raises almost any class of exception.
        return f"Triton failed to build or launch a kernel: {_text(error)}"
    return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def _warn_once(device: torch.device, reason: str) -> None:
    if device in _warned:
        return
    _warned.add(device)
    warnings.warn(
        GradscaleWarning(
            f"{reason}. Plain PyTorch operations are used on {device} instead: the "
            "results are the same, and a step takes longer. Repair the installation of "
            "Triton, or pass kernels='plain'.",
            code="GS110",
        ),
        stacklevel=3,
    )
