"""The gradients of some parameters, side by side."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.looks.plain import Numbers, numbers


class Places(NamedTuple):
    """Where gradients lay that do not overlap.

    Attributes:
        kind, addresses: As in `Gradients`.
    """

    kind: tuple[torch.device, torch.dtype] | None
    addresses: Numbers


class Gradients(NamedTuple):
    """The gradients of some parameters, dense and real, each memory once.

    Attributes:
        params: The parameter behind each entry of `tensors`.
        tensors: float[...] each; views where the gradient is complex, sparse or a
            DTensor, so that writing into them changes the gradient.
        addresses, versions: Of each: where both are the same, so are the values.
        kind: (device, dtype) of all of them; None if they may differ.
        present: How many parameters have a gradient, empty and shared ones included.
        shared: Two parameters have one and the same gradient.
        copies: Of each, how many ranks hold the same elements; None if each rank has
            its own.
        wrapped: `.grad` of every parameter that has one, where these are not `tensors`
            themselves; else None.
        numels: How many elements each has, if somebody has looked.
    """

    params: list[Tensor]
    tensors: Sequence[Tensor]
    addresses: Numbers
    versions: Numbers
    kind: tuple[torch.device, torch.dtype] | None
    present: int
    shared: bool = False
    copies: list[float] | None = None
    wrapped: list[Tensor] | None = None
    numels: Numbers | None = None

    def places(self) -> Places:
        """Return where they lie, without holding them."""
        return Places(self.kind, self.addresses)

    def only(self, places: list[int]) -> "Gradients":
        """Return those at these places."""
        # Of what is compiled, neither addresses nor versions are known.
        known = places if self.versions else []
        return self._replace(
            params=[self.params[i] for i in places],
            tensors=[self.tensors[i] for i in places],
            addresses=numbers([self.addresses[i] for i in known]),
            versions=numbers([self.versions[i] for i in known]),
            present=len(places),
            copies=None if self.copies is None else [self.copies[i] for i in places],
            numels=None,
        )
