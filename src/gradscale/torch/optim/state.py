"""The state of a parameter: dtypes, initial values, conversion of loaded entries."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# The dtype of moments and masters, and of the arithmetic.
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
# Entries with the shape of the parameter; others are passed through.
_OF_PARAMETER_SHAPE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", MASTER)
)


class Loaded:
    """One parameter's state during torch's `load_state_dict`.

    Torch casts every tensor in a state to the dtype of the parameter, which would round
    moments and masters. Objects of unknown classes are passed through unchanged.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def needs_master(param: Tensor) -> bool:
    """Return whether the parameter is the rounded copy of a wider master."""
    return WIDE.get(param.dtype, param.dtype) is not param.dtype


def adopt(param: Tensor, name: str, value: Any) -> Any:
    """Return an entry on the device of its parameter and in the wide dtype.

    Returns the same object if nothing has to change.
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
    """Replace each `Loaded` by a state converted for its parameter."""
    steps: list[tuple[Tensor, dict[str, Any]]] = []
    for param, held in states.items():
        if not isinstance(held, Loaded):
            continue
        state = states[param] = {
            name: value if name == STEP else adopt(param, name, value)
            for name, value in held.state.items()
            # An f32 parameter has no master: a loaded one would become stale.
            if (name != MASTER or needs_master(param)) and not _is_missing(name, value)
        }
        if state.get(STEP) is not None:
            steps.append((param, state))
    share_steps(steps)


def _is_missing(name: str, value: Any) -> bool:
    """Return whether an entry is the placeholder of one that was not saved.

    `torch.distributed.checkpoint` requests every entry that the optimizer has now from
    a flat state dict, and fills in {} for missing ones.
    """
    known = name == STEP or name in _OF_PARAMETER_SHAPE
    return known and isinstance(value, dict) and not value


def share_steps(counted: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
    """Make the step counts of some parameters views of one tensor on each device.

    A tensor takes at least 512 bytes on a CUDA device, and moving thousands of them
    takes thousands of copies.
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
            # Allocated on the device: a copy from the host would wait for it.
            together = torch.zeros(len(values), dtype=torch.float32, device=device)
        for state, view in zip(states, together.to(device).unbind(), strict=True):
            state[STEP] = view


def fresh(param: Tensor, name: str) -> Tensor:
    """Return the initial value of an entry: the parameter in f32, or zeros."""
    wide = WIDE[param.dtype]
    if name == MASTER:
        return param.detach().to(wide, memory_format=torch.preserve_format)
    return torch.zeros_like(param, dtype=wide, memory_format=torch.preserve_format)
