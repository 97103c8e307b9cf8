"""PyTorch's protocol for optimizers that unscale and skip in their own kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.tensor_list import GradSnapshot


@contextmanager
def amp_attributes(
    optimizer: Any,
    grad_scale: Tensor | None,
    found_inf: Tensor,
    snapshot: GradSnapshot | None = None,
) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` on the optimizer for one step.

    A `grad_scale` that the user had set is consumed by the step, as in torch, and
    restored if the step fails.

    Args:
        optimizer: A fused optimizer.
        grad_scale: f32[], the divisor of the gradients; None to leave them.
        found_inf: f32[], 1 to skip the step, else 0. The kernels test for exactly 1.
        snapshot: Its gradients as they were just collected; None if it cannot use them.
    """
    preset = getattr(optimizer, "grad_scale", None)
    if preset is not None:
        grad_scale = preset if grad_scale is None else preset * grad_scale
    optimizer.grad_scale = grad_scale
    optimizer.found_inf = found_inf
    if snapshot is not None:
        optimizer.grad_snapshot = snapshot
    done = False
    try:
        yield
        done = True
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        if snapshot is not None:
            del optimizer.grad_snapshot
        if preset is not None and not done:
            optimizer.grad_scale = preset


def prepare_momentum(optimizer: Any) -> bool:
    """Allocate the momentum buffers of fused SGD before a step that may be skipped.

    Torch allocates them uninitialised in the first step and leaves them so when the
    kernel skips. Zeros make the first update of the kernel equal to torch's rule for
    the first step, `buffer = gradient`, unless dampening is used.

    Returns:
        True if the buffers could not be prepared: the flag must be read before this
        one step.
    """
    own = getattr(optimizer, "write_back", None) is not None
    if own or not isinstance(optimizer, torch.optim.SGD):
        return False
    must_know = False
    for group in optimizer.param_groups:
        if not group["fused"] or group["momentum"] == 0:
            continue
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state[param]
            if state.get("momentum_buffer") is not None:
                continue
            if group["dampening"] != 0:
                must_know = True
            else:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
    return must_know
