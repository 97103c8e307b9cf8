"""Increments and takes back the step counts of many tensors, in one launch."""

import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.pointer_table import Table

BLOCK = 256


def count_(table: Table, row: int, found_inf: Tensor | None) -> None:
    """Add 1 to each f32[] whose address is in a row, unless `found_inf` is set.

    Args:
        table: Any pointer table.
        row: The row of the counts, from 0 for the first of the table.
        found_inf: f32[], 0 to count; None is 0.
    """
    _count(
        -(-table.tensors // BLOCK),
        (table.cells, table.cells if found_inf is None else found_inf),
        (table.tensors,),
        ROW=row,
        CHECKED=found_inf is not None,
        BLOCK=BLOCK,
    )


@launched(num_warps=4, enable_fp_fusion=True)
def _count(
    cells_ptr,
    found_ptr,
    tensors,
    ROW: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if CHECKED:
        # A flag of another library may be a count.
        if tl.load(found_ptr) != 0.0:
            return
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < tensors
    address = tl.load(cells_ptr + ROW * tensors + places, mask=inside, other=0)
    count_ptr = address.to(tl.pointer_type(tl.float32))
    count = tl.load(count_ptr, mask=inside, other=0.0)
    tl.store(count_ptr, count + 1.0, mask=inside)


def take_back_(table: Table, row: int, found_inf: Tensor) -> None:
    """Subtract `found_inf` from each f32[] whose address is in a row.

    Args:
        table: Any pointer table.
        row: The row of the counts, from 0 for the first of the table.
        found_inf: f32[], 0 to change nothing.
    """
    _take_back(
        -(-table.tensors // BLOCK),
        (table.cells, found_inf),
        (table.tensors,),
        ROW=row,
        BLOCK=BLOCK,
    )


@launched(num_warps=4, enable_fp_fusion=True)
def _take_back(cells_ptr, found_ptr, tensors, ROW: tl.constexpr, BLOCK: tl.constexpr):
    found = tl.load(found_ptr)
    if found != 0.0:
        places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = places < tensors
        address = tl.load(cells_ptr + ROW * tensors + places, mask=inside, other=0)
        count_ptr = address.to(tl.pointer_type(tl.float32))
        count = tl.load(count_ptr, mask=inside, other=0.0)
        tl.store(count_ptr, count - found, mask=inside)
