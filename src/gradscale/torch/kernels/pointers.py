"""Device functions shared by the kernels: the address of a chunk, masks, unscaling."""

import triton
import triton.language as tl


@triton.jit
def locate(cells_ptr, owners_ptr, tensors, CHUNK: tl.constexpr):
    """Return (column, first element, elements left) of this program's chunk."""
    chunk = tl.program_id(0)
    owner = tl.load(owners_ptr + chunk)
    numel = tl.load(cells_ptr + owner)
    # int64: one tensor may hold more than 2**31 elements.
    start = (chunk - tl.load(cells_ptr + tensors + owner)) * CHUNK
    return owner, start, numel - start


@triton.jit
def address(cells_ptr, tensors, owner, ROW: tl.constexpr):
    """Return the address of the tensor of one list, as an integer."""
    return tl.load(cells_ptr + ROW * tensors + owner)


@triton.jit
def pointer(begin, start, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Return a pointer to the element `start` of a tensor.

    With FULL, it must be aligned to 16 bytes, which a thread then loads at once.
    """
    at = begin + start * (DTYPE.primitive_bitwidth // 8)
    found = at.to(tl.pointer_type(DTYPE))
    if FULL:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def mask(places, left, CHUNK: tl.constexpr, FULL: tl.constexpr):
    """Return which positions of a chunk are inside the tensor; with FULL, all."""
    if FULL:
        # A constant, so that the compiler drops the mask.
        inside = tl.full((CHUNK,), 1, tl.int1)
    else:
        inside = places < left
    return inside


@triton.jit
def unscaled(grad, scale, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr):
    """Return the gradient in f32, divided by the scale, negated to maximize."""
    wide = grad.to(tl.float32)
    if SCALED:
        wide = tl.div_rn(wide, scale)
    if MAXIMIZE:
        wide = -wide
    return wide


@triton.jit
def one_minus_exp(x):
    """Return 1 - exp(x) for x <= 0, without loss where x is small."""
    # Nine terms: the first omitted one is below 2^-24 of the sum for x > -0.5.
    tail = 1.0 + x * (1.0 / 9.0)
    tail = 1.0 + x * (1.0 / 8.0) * tail
    tail = 1.0 + x * (1.0 / 7.0) * tail
    tail = 1.0 + x * (1.0 / 6.0) * tail
    tail = 1.0 + x * (1.0 / 5.0) * tail
    tail = 1.0 + x * (1.0 / 4.0) * tail
    tail = 1.0 + x * (1.0 / 3.0) * tail
    tail = 1.0 + x * (1.0 / 2.0) * tail
    return tl.where(x > -0.5, -x * tail, 1.0 - tl.exp(x))
