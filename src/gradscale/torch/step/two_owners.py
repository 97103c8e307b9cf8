"""Unscaling gradients that another optimizer may have unscaled."""

from collections.abc import Iterable

import torch
from torch import Tensor

from gradscale.errors import GradientError
from gradscale.torch.grads.unscale import inverse, multiply_
from gradscale.torch.names import names_of
from gradscale.torch.step.optimizer_step import OpenStep


def unscale_once_(
    step: OpenStep, others: Iterable[OpenStep], inv_scale: Tensor
) -> None:
    """Multiply the gradients of `step`; those that another step unscaled stay.

    Raises:
        GradientError: One of them was unscaled with another optimizer and changed
            since: nobody can tell what it now holds.
    """
    assert step.gradients is not None
    unscaled = {
        tensor.data_ptr(): (version, other.leftover)
        for other in others
        if other.gradients is not None and other.versions is not None
        for tensor, version in zip(other.gradients.tensors, other.versions, strict=True)
    }
    if not unscaled:
        multiply_(step.gradients.tensors, inv_scale, step.gradients.kind)
        return
    fresh, rest = [], []
    pairs = zip(step.gradients.params, step.gradients.tensors, strict=True)
    for param, tensor in pairs:
        version, leftover = unscaled.get(tensor.data_ptr(), (None, None))
        if version is None:
            fresh.append(tensor)
        elif version != tensor._version:
            raise _two_owners(names_of([param], step.names)[0])
        elif leftover is not None:
            rest.append((tensor, leftover))
    multiply_(fresh, inv_scale)
    for tensor, (skip, scale) in rest:
        multiply_([tensor], torch.where(skip == 0.0, 1.0, inverse(scale)))


def _two_owners(name: str) -> GradientError:
    return GradientError(
        f"{name} belongs to two optimizers; its gradient was unscaled with the first "
        "and changed since. Whether it is scaled now cannot be told. Call update() "
        "between the two steps, or give each parameter to one optimizer.",
        code="GS106",
    )
