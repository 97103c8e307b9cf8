"""What every pass of an optimizer begins with: where a chunk's elements are."""

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
    """Return where the tensor of one list begins, as an integer."""
    return tl.load(cells_ptr + ROW * tensors + owner)


@triton.jit
def pointer(begin, start, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    """Return a pointer to the element `start` of a tensor.

    With WHOLE, the caller vouches that it is a multiple of 16 bytes, which a thread can
    then load at once.
    """
    at = begin + start * (DTYPE.primitive_bitwidth // 8)
    found = at.to(tl.pointer_type(DTYPE))
    if WHOLE:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def within(places, left, CHUNK: tl.constexpr, WHOLE: tl.constexpr):
    """Return which places of a chunk are inside; with WHOLE, all of them."""
    if WHOLE:
        # A constant, so that the compiler drops the mask.
        inside = tl.full((CHUNK,), 1, tl.int1)
    else:
        inside = places < left
    return inside


@triton.jit
def unscaled(grad, scale, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr):
    """Return the gradient in f32, divided by the scale, negated to climb."""
    wide = grad.to(tl.float32)
    if SCALED:
        wide = tl.div_rn(wide, scale)
    if MAXIMIZE:
        wide = -wide
    return wide


@triton.jit
def one_minus_exp(x):
    """Return 1 - exp(x) for x <= 0, without loss where x is small."""
    # Nine terms: the first left out is below 2^-24 of the sum for x > -0.5.
    tail = 1.0 + x * (1.0 / 9.0)
    tail = 1.0 + x * (1.0 / 8.0) * tail
    tail = 1.0 + x * (1.0 / 7.0) * tail
    tail = 1.0 + x * (1.0 / 6.0) * tail
    tail = 1.0 + x * (1.0 / 5.0) * tail
    tail = 1.0 + x * (1.0 / 4.0) * tail
    tail = 1.0 + x * (1.0 / 3.0) * tail
    tail = 1.0 + x * (1.0 / 2.0) * tail
    return tl.where(x > -0.5, -x * tail, 1.0 - tl.exp(x))
