"""The operations of apex's compiled `amp_C` that third-party code calls, in torch.

Each sets the flag to 1 if a checked input is not finite.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: float,
) -> None:
    """Write each input times `scale` into its output. No host sync.

    Args:
        chunk_size: Has no effect.
        noop_flag: int[1], set to 1 if an input is not finite.
        tensor_lists: Inputs and outputs.
        scale: The factor.
    """
    inputs, outputs = tensor_lists
    _flag(noop_flag, inputs)
    for given, out in zip(inputs, outputs, strict=True):
        out.copy_(given.float() * scale)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """Write `a * x + b * y` into each output. No host sync.

    Args:
        chunk_size: Has no effect.
        noop_flag: int[1], set to 1 if a checked input is not finite.
        tensor_lists: The lists x, y and outputs.
        a, b: The factors.
        arg_to_check: 0 to check x, 1 for y, -1 for both.
    """
    xs, ys, outputs = tensor_lists
    if arg_to_check != 1:
        _flag(noop_flag, xs)
    if arg_to_check != 0:
        _flag(noop_flag, ys)
    for x, y, out in zip(xs, ys, outputs, strict=True):
        out.copy_(a * x.float() + b * y.float())


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return f32[1], the joint norm, and f32[n], the norm of each tensor, or f32[0].

    Args:
        chunk_size: Has no effect.
        noop_flag: int[1], set to 1 if a norm is not finite.
        tensor_lists: One list of inputs.
        per_tensor: Return the norm of each; else an empty tensor.
    """
    (inputs,) = tensor_lists
    norms = torch.stack(torch._foreach_norm([tensor.float() for tensor in inputs]))
    _flag(noop_flag, [norms])
    return norms.norm().reshape(1), norms if per_tensor else norms[:0]


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norms of inputs times `inv_scale`; see `multi_tensor_l2norm`."""
    (inputs,) = tensor_lists
    unscaled = [tensor.detach().float() * inv_scale for tensor in inputs]
    return multi_tensor_l2norm(chunk_size, noop_flag, [unscaled], per_tensor)


def _flag(noop_flag: Tensor, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        finite = torch.isfinite(tensor).all()
        noop_flag.masked_fill_(~finite.to(noop_flag.device), 1)
