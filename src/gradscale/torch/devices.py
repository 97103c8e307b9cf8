"""Device names, availability of devices, and copies between them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import ConfigError, GradscaleWarning


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, without waiting where that is safe.

    A copy to the host must be waited for: the next operation there would read the
    memory before the data arrives.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def device_type(device: Any) -> str:
    """Return the type of a device; raise for an unknown one."""
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        raise ConfigError(
            f"The first argument is {device!r}, a {type(device).__name__}. It names "
            "the device; the initial scale comes second. Write "
            f"gradscale.torch.GradScaler('cuda', init_scale={device!r}), or use the "
            f"older signature as gradscale.torch.cuda.amp.GradScaler({device!r}).",
            code="GS107",
        )
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(
            f"device={device!r} is not a device that this PyTorch knows. The scaler "
            "would do nothing on it. Pass 'cuda', 'cpu', 'mps' or 'xpu'.",
            code="GS107",
        ) from error


def is_available(kind: str) -> bool:
    """Return whether a device of this type can be used."""
    if kind == "cpu":
        return True
    if kind == "cuda":
        return not torch.cuda.amp.common.amp_definitely_not_available()
    try:
        return bool(torch.get_device_module(kind).is_available())
    except RuntimeError:
        return False


def warn_disabled(kind: str, frames: int) -> None:
    """Warn that scaling is disabled because the device is unavailable.

    Args:
        kind: The type of the device.
        frames: The number of frames up to the user's line.
    """
    if kind == "cuda":
        # Torch's own text, so that existing warning filters match.
        warnings.warn(
            "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  "
            "Disabling.",
            stacklevel=frames,
        )
    else:
        message = (
            f"GradScaler is enabled for device '{kind}', which is not available here. "
            "Scaling is turned off: gradients are neither scaled nor checked. Pass "
            "device='cpu' to scale on the CPU, or enabled=False to say so yourself."
        )
        warnings.warn(GradscaleWarning(message, code="GS107"), stacklevel=frames)


def can_touch_host() -> bool:
    """Return False while a graph is compiled or captured, which excludes host work."""
    if torch.compiler.is_compiling():
        return False
    # Before CUDA is initialised there is no capture; `is_available` takes longer.
    there = torch.cuda.is_initialized()
    return not (there and torch.cuda.is_current_stream_capturing())


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave `torch.inference_mode`, whose tensors cannot be written to outside of it.

    Gradients remain disabled.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
