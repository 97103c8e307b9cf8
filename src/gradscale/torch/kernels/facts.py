"""What a read has found in many tensors of one kind."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.kernels.pointer_table import Table


class Tiling(NamedTuple):
    """How programs share the partial results of a read among them.

    Attributes:
        tensors: Those that a program gathers.
        partials: The results of each that it adds up at once.
        slices: The programs that share the results of one tensor.
    """

    tensors: int
    partials: int
    slices: int


class Parts(NamedTuple):
    """What a read has left of each chunk.

    Attributes:
        table: Of the tensors. Whoever needs it must come before its next change.
        cells: i64[2 * chunks], for each chunk the sum of squares as bits of an f64,
            then for each the largest magnitude as bits of an f32.
        each: i64[...], room for the same of each tensor, for the same of its slices
            where it has more than one, and for a count of programs that are done,
            which is 0.
        tiling: How the chunks are gathered.
        gather: Returns (peaks, squares) of these parts. No host sync.
    """

    table: Table
    cells: Tensor
    each: Tensor
    tiling: Tiling
    gather: Callable[["Parts"], tuple[Tensor, Tensor]]


class TensorFacts:
    """What was read of each tensor. On their device.

    Attributes:
        dtype: That of all of them.
        parts: Of the read, until they are gathered; None from then on.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        peaks: Tensor | None = None,
        squares: Tensor | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Hold peaks and squares, or the parts that they are gathered from."""
        self.dtype = dtype
        self.parts = parts
        self._peaks, self._squares = peaks, squares
        self._each: Tensor | None = None
        self._tensors = 0 if parts is None else parts.table.tensors

    @property
    def peaks(self) -> Tensor:
        """f32[n], the largest magnitude of each; NaN if there is one."""
        return self._gathered()[0]

    @property
    def squares(self) -> Tensor:
        """f64[n], the sum of squares of each."""
        return self._gathered()[1]

    def were_gathered(self, each: Tensor) -> None:
        """Take over what a kernel has gathered of the parts."""
        self.parts, self._each = None, each

    def _gathered(self) -> tuple[Tensor, Tensor]:
        if self._each is not None:
            # Anew each time: a replayed graph writes there again.
            return peaks_and_squares(self._each, self._tensors)
        if self.parts is not None:
            self._peaks, self._squares = self.parts.gather(self.parts)
            self.parts = None
        assert self._peaks is not None
        assert self._squares is not None
        return self._peaks, self._squares


def peaks_and_squares(each: Tensor, tensors: int) -> tuple[Tensor, Tensor]:
    """Return both as tensors, from where a kernel has written them."""
    squares = each[:tensors].view(torch.float64)
    peaks = each[even(tensors) :][:tensors].int().view(torch.float32)
    return peaks, squares


def even(tensors: int) -> int:
    """Return where the peaks begin: at a multiple of 16 bytes."""
    return tensors + tensors % 2
