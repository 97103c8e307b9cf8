"""Multiplies a loss, or a nest of outputs, by the scale."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.devices import to_device

HALVES = (torch.float16, torch.bfloat16)
# The key in the metadata of an autograd node.
_SCALED = "scaled by gradscale"


def times(output: Tensor, scale: Tensor) -> Tensor:
    """Return `output * scale`; a half-precision loss is scaled in f32.

    Torch does so for a loss without dimensions; a loss of shape (1,) would overflow
    at 65504.
    """
    if output.dtype in HALVES and output.numel() == 1:
        output = output.float()
    if scale.device != output.device:
        scale = to_device(scale, output.device)
    return output * scale


def mark_scaled(scaled: Tensor) -> None:
    """Mark a loss as scaled.

    >>> loss = torch.ones((), requires_grad=True) * 1.0
    >>> scaled = times(loss, torch.tensor(4.0))
    >>> mark_scaled(scaled)
    >>> is_scaled(loss), is_scaled(scaled)
    (False, True)
    """
    marks = _marks(scaled)
    if marks is not None:
        marks[_SCALED] = True


def is_scaled(loss: Any) -> bool:
    """Return whether a tensor was marked as a scaled loss."""
    return isinstance(loss, Tensor) and _SCALED in (_marks(loss) or ())


def _marks(loss: Tensor) -> dict[Any, Any] | None:
    node: Any = loss.grad_fn
    return None if node is None else node.metadata


def map_outputs(outputs: Any, one: Callable[[Tensor], Tensor]) -> Any:
    """Apply `one` to every tensor of a nest of lists, tuples and other iterables.

    Lists and tuples, named ones too, keep their type; any other iterable becomes an
    iterator, as in torch.
    """
    if isinstance(outputs, Tensor):
        return one(outputs)
    if isinstance(outputs, (str, bytes, Mapping)) or not isinstance(outputs, Iterable):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    mapped = (map_outputs(output, one) for output in outputs)
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*mapped)
    return type(outputs)(mapped) if isinstance(outputs, (list, tuple)) else mapped
