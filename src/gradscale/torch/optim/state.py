"""What an optimizer keeps for each parameter: dtypes, first values, adoption."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# The dtype of moments and masters, and so of the arithmetic.
WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
STEP, MASTER = "step", "master"
# What a parameter of a state dict may have beside entries that nobody here knows.
_OF_PARAMETER_SHAPE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", MASTER)
)


class Loaded:
    """One parameter's state on its way through torch's `load_state_dict`.

    Torch casts every tensor that it finds to the dtype of the parameter: moments and
    masters would be rounded. What it does not know it passes on as it is.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def needs_master(param: Tensor) -> bool:
    """Return whether the parameter is only a rounded copy of the exact one."""
    return WIDE.get(param.dtype, param.dtype) is not param.dtype


def adopt(param: Tensor, name: str, value: Any) -> Any:
    """Return a kept value as the passes need it: on the device, in the wide dtype.

    The very same tensor if it is so already.
    """
    if not isinstance(value, Tensor):
        return value
    dtype = value.dtype
    if name in _OF_PARAMETER_SHAPE:
        dtype = WIDE.get(param.dtype, param.dtype)
    elif name == STEP:
        dtype = torch.float32
        if value.dim() > 0:
            value = value.reshape(())
    if value.dtype is dtype and value.device == param.device:
        return value
    return value.to(param.device, dtype)


def adopt_loaded(states: dict[Any, Any]) -> None:
    """Replace each `Loaded` by a state that fits its parameter."""
    steps: list[tuple[Tensor, dict[str, Any]]] = []
    for param, held in states.items():
        if not isinstance(held, Loaded):
            continue
        state = states[param] = {
            name: value if name == STEP else adopt(param, name, value)
            for name, value in held.state.items()
            # An f32 parameter is its own master; one kept along would grow stale.
            if (name != MASTER or needs_master(param)) and not _is_missing(name, value)
        }
        if state.get(STEP) is not None:
            steps.append((param, state))
    share_steps(steps)


def _is_missing(name: str, value: Any) -> bool:
    """Return whether an entry was asked for where there was none.

    `torch.distributed.checkpoint` asks a flat state dict for what the optimizer has
    now, and gives {} for what was not saved.
    """
    known = name == STEP or name in _OF_PARAMETER_SHAPE
    return known and isinstance(value, dict) and not value


def share_steps(counted: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
    """Make the steps of some parameters views of one tensor on each device.

    A tensor takes at least 512 bytes on a CUDA device, and thousands that are moved
    there one by one take thousands of copies.
    """
    places: dict[Any, list[dict[str, Any]]] = {}
    for param, state in counted:
        step = state[STEP]
        source = step.device if isinstance(step, Tensor) else None
        places.setdefault((source, param.device), []).append(state)
    for (source, device), states in places.items():
        values = [state[STEP] for state in states]
        if source is not None:
            together = torch.stack([v.detach().reshape(()).float() for v in values])
        elif any(values):
            together = torch.tensor(values, dtype=torch.float32, device="cpu")
        else:
            # Made there: a copy from the host would wait for the device.
            together = torch.zeros(len(values), dtype=torch.float32, device=device)
        for state, view in zip(states, together.to(device).unbind(), strict=True):
            state[STEP] = view


def fresh(param: Tensor, name: str) -> Tensor:
    """Return the first value of an entry: the exact parameter, or zeros."""
    wide = WIDE[param.dtype]
    if name == MASTER:
        return param.detach().to(wide, memory_format=torch.preserve_format)
    return torch.zeros_like(param, dtype=wide, memory_format=torch.preserve_format)
