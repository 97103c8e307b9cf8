"""Whether an optimizer comes from an earlier run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.devices import host_value

# Of these, `host_value` reads a number.
HOST_DTYPES = (torch.float32, torch.float64)


def has_steps(optimizer: Any) -> bool:
    """Return whether the optimizer has a state that steps have made. No host sync.

    Looks at one parameter. A count of steps is read only where that needs no wait; one
    on a device is taken for more than 0. An optimizer that keeps no state, such as SGD
    without momentum, cannot be told from a new one.
    """
    states = getattr(optimizer, "state", None)
    if not isinstance(states, Mapping):
        return False
    made = (state for state in states.values() if isinstance(state, Mapping) and state)
    first = next(made, None)
    return first is not None and _is_used(first)


def _is_used(state: Mapping[str, Any]) -> bool:
    # Some make their state with themselves, and count from 0: torch's Adagrad does.
    step = state.get("step", 1)
    if isinstance(step, (int, float)):
        return step > 0
    on_host = type(step) is Tensor and step.device.type == "cpu"
    counts = on_host and step.numel() == 1 and step.dtype in HOST_DTYPES
    return not counts or host_value(step) > 0.0
