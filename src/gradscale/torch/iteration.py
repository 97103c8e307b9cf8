"""What is open between two updates: one entry for each optimizer that was touched."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import GradientError
from gradscale.torch.clipping import Clip
from gradscale.torch.gradients import Gradients, Reading
from gradscale.torch.names import names_of


@dataclass
class OpenStep:
    """One optimizer's step before `update()`.

    Attributes:
        optimizer: Whose step it is.
        gradients: As last gathered; None before that.
        reading: What they showed when they were last read.
        versions: The version of each gradient after it was unscaled or stepped on;
            None while it is as backward left it.
        clip: The clip that waits to be folded into the step, or was applied.
        found: f32[], 1 if an element was not finite, else 0.
        amax: f32[], agreed by all ranks.
    """

    optimizer: Any
    gradients: Gradients | None = None
    reading: Reading | None = None
    versions: list[int] | None = None
    clip: Clip | None = None
    found: Tensor | None = None
    amax: Tensor | None = None

    def close(self) -> None:
        """Note that the gradients are unscaled from here on."""
        if self.gradients is not None and not torch.compiler.is_compiling():
            self.versions = [tensor._version for tensor in self.gradients.tensors]


def still_scaled(
    gradients: Gradients, others: list[OpenStep], names: object
) -> list[Tensor]:
    """Return the tensors that no other optimizer has unscaled in this iteration.

    Raises:
        GradientError: One of them was unscaled with another optimizer and changed
            since: nobody can tell what it now holds.
    """
    unscaled = {
        tensor.data_ptr(): version
        for other in others
        if other.gradients is not None and other.versions is not None
        for tensor, version in zip(
            other.gradients.tensors, other.versions, strict=True
        )
    }
    if not unscaled:
        return gradients.tensors
    rest = []
    for param, tensor in zip(gradients.params, gradients.tensors, strict=True):
        version = unscaled.get(tensor.data_ptr())
        if version is None:
            rest.append(tensor)
        elif version != tensor._version:
            raise GradientError(
                f"{names_of([param], names)[0]} belongs to two optimizers; its "
                "gradient was unscaled with the first and changed since. Whether it "
                "is scaled now cannot be told. Call update() between the two steps, "
                "or give each parameter to one optimizer.",
                code="GS106",
            )
    return rest
