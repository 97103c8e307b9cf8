"""Decides how an optimizer is stepped."""

import inspect
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gradscale.torch.kernels import Kernels, usable
from gradscale.torch.kernels.torch_fused_adam import stands_in


class StepMode(Enum):
    """How an optimizer gets the scale, and skips.

    OWN: Unscales, clips and skips in its own pass and leaves the gradients unchanged.
        No host sync.
    FUSED: The same by PyTorch's protocol; it writes the unscaled gradients. No host
        sync. For Adam and AdamW a kernel of gradscale replaces torch's where it can.
        gradscale's own optimizers with `write_back` are stepped so too.
    MASTERS: Unscales into the gradients of f32 masters, in its step or in `unscale_`,
        skips, and leaves the model's gradients unchanged. One flag read, unless the
        optimizer that it wraps is fused.
    OLDER: Takes the scaler itself as an argument of `step`, an older protocol.
    FLAG: Takes neither scale nor scaler: the gradients are unscaled before, and the
        host reads one flag.
    """

    OWN = "own"
    FUSED = "fused"
    MASTERS = "masters"
    OLDER = "older"
    FLAG = "flag"


class Path(NamedTuple):
    """How the scaler will step an optimizer.

    Attributes:
        way: "own", "fused", "masters", "older" or "flag".
        kernels: "triton" or "plain": what reads the gradients and decides the step.
        meaning: The same in words.
    """

    way: str
    kernels: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.way}, {self.kernels} kernels: {self.meaning}"


MEANING = {
    StepMode.OWN: "the gradients are read once and used in one pass, without a host "
    "sync",
    StepMode.FUSED: "the gradients are read once; PyTorch's fused kernel unscales, "
    "clips and steps, without a host sync",
    StepMode.MASTERS: "the gradients are read once and unscaled into those of the "
    "float32 masters; the host reads one flag before the step",
    StepMode.OLDER: "the optimizer is given the scaler itself, and decides for itself",
    StepMode.FLAG: "the gradients are read and unscaled; the host reads one flag "
    "before the step",
}
WRITING_BACK = (
    "the gradients are read once and used in one pass, which also writes them "
    "unscaled, without a host sync"
)
FUSED_MASTERS = (
    "the gradients are read once and unscaled into those of the float32 masters, which "
    "PyTorch's fused kernel steps, without a host sync"
)
STANDING_IN = (
    "the gradients are read once; PyTorch's fused kernel unscales, clips and steps, or "
    "for groups of f32 parameters that are not small one launch with the same bits, "
    "without a host sync"
)


def unscales_itself(optimizer: Any) -> bool:
    """Return whether the optimizer takes `grad_scale` and `found_inf`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def mode_of(optimizer: Any) -> StepMode:
    """Return how the optimizer is to be stepped."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return StepMode.FLAG
    if getattr(optimizer, "write_back", None) is False:
        return StepMode.OWN
    if getattr(optimizer, "unscale_to_masters", None) is not None:
        return StepMode.MASTERS
    step = optimizer.step
    return (
        StepMode.OLDER
        if _wants_scaler(getattr(step, "__func__", step))
        else StepMode.FUSED
    )


def needs_closure(optimizer: Any) -> bool:
    """Return whether the optimizer cannot step without a closure.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> needs_closure(torch.optim.LBFGS([weight])), needs_closure(torch.optim.SGD([weight]))
    (True, False)
    """  # noqa: E501
    try:
        parameters = inspect.signature(optimizer.step).parameters
    except (TypeError, ValueError):
        # Not every callable has a signature.
        return False
    closure = parameters.get("closure")
    return closure is not None and closure.default is closure.empty


@lru_cache
def _wants_scaler(step: Callable[..., Any]) -> bool:
    """Return whether `step` still takes the scaler itself."""
    return "grad_scaler" in inspect.signature(step).parameters


def path_of(optimizer: Any, kernels: Kernels, device: torch.device) -> Path:
    """Return the path of an optimizer whose gradients are on `device`."""
    mode = mode_of(optimizer)
    name = "triton" if usable(kernels, device) else "plain"
    meaning = MEANING[mode]
    if mode is StepMode.FUSED and getattr(optimizer, "write_back", None) is True:
        meaning = WRITING_BACK
    elif mode is StepMode.MASTERS and unscales_itself(optimizer.inner):
        meaning = FUSED_MASTERS
    elif mode is StepMode.FUSED and stands_in(optimizer, kernels, device):
        meaning = STANDING_IN
    return Path(mode.value, name, meaning)
