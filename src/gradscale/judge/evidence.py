"""What is known of an operation that lost a value, and what it looks like.

The names of operations are those of PyTorch's operator library without prefix and
overload: `softmax`, `masked_fill`, `layer_norm`.
"""

from typing import NamedTuple

# The smallest float16 above 0 is 2**-24; anything below half of it is 0, and what is
# above becomes a divisor that overflows.
SMALLEST_HALF = 2.0**-24
# float16 has 11 bits: 1 - x is 1 if x is at most half the step below 1.
ROUNDS_TO_ONE = 2.0**-12
# Masks from here on leave no room for a score in float16, whose largest is 65504.
LARGE_MASK = -6.0e4

HALF = "float16"
LOGS = {"log", "log2", "log10", "log1p"}
DIVISIONS = {"div", "reciprocal", "rsqrt"}
SOFTMAXES = {"softmax", "log_softmax", "logsumexp"}
NORMALISATIONS = {"layer_norm", "batch_norm", "group_norm", "rms_norm"}
NORMALISATIONS |= {"cudnn_batch_norm", "miopen_batch_norm"}
NORMALISATIONS |= {"fused_rms_norm", "var", "var_mean", "std", "std_mean"}
NORMS = {"linalg_vector_norm", "norm", "cdist", "linalg_norm"}
SUMS = {"sum", "mean", "cumsum", "cumprod", "prod", "nansum", "dot", "logcumsumexp"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "linear", "mv", "addmv"}
PRODUCTS |= {"addbmm", "einsum", "matmul"}
ARCS = {"acos", "asin", "atanh", "acosh"}
EXPONENTIALS = {"exp", "expm1", "exp2", "cosh", "sinh"}


class Range(NamedTuple):
    """The finite values of one input, from `low` to `high`."""

    low: float
    high: float


class Maker(NamedTuple):
    """An operation that made an input, with the numbers written in its call."""

    operation: str
    constants: tuple[float, ...] = ()


class Evidence(NamedTuple):
    """What is known of the operation in which a value stopped being finite.

    Attributes:
        operation: Its name.
        direction: "forward" or "backward"; backward means the gradient of `operation`.
        kind: "inf" or "nan".
        dtype: Of the value that is not finite, such as "float16".
        inputs: The finite range of each input of the forward operation.
        constants: The numbers written in the call.
        makers: The operations its inputs came from, the nearest first.
        inf_before: An input was already infinite.
        module: The class of the module it ran in.
    """

    operation: str
    direction: str
    kind: str
    dtype: str
    inputs: tuple[Range, ...] = ()
    constants: tuple[float, ...] = ()
    makers: tuple[Maker, ...] = ()
    inf_before: bool = False
    module: str = ""


def log_of_softmax(seen: Evidence) -> bool:
    """The logarithm of a softmax."""
    return seen.operation in LOGS and _made_by(seen, {"softmax"}, 2)


def log_of_sigmoid(seen: Evidence) -> bool:
    """The logarithm of a sigmoid."""
    return seen.operation in LOGS and _made_by(seen, {"sigmoid"}, 2)


def rounds_to_one(seen: Evidence) -> bool:
    """A bound just below 1 that is 1 in float16."""
    limits = {"clamp", "clamp_max", "mul", "sub", "rsub", "minimum"}
    near_one = any(
        abs(abs(constant) - 1.0) <= ROUNDS_TO_ONE and abs(constant) != 1.0
        for maker in seen.makers
        if maker.operation in limits
        for constant in maker.constants
    )
    tiny = any(
        0.0 < abs(constant) <= ROUNDS_TO_ONE
        for maker in seen.makers
        if maker.operation in {"sub", "rsub"}
        for constant in maker.constants
    )
    ends_at_one = LOGS | ARCS | {"logit", "erfinv", "div"}
    return seen.operation in ends_at_one and _is_half(seen) and (near_one or tiny)


def log_with_tiny_eps(seen: Evidence) -> bool:
    """A logarithm whose eps is 0 in float16."""
    return seen.operation in LOGS and _is_half(seen) and _tiny_eps(seen)


def log_at_zero(seen: Evidence) -> bool:
    """A logarithm of 0 or less."""
    return seen.operation in LOGS and any(each.low <= 0.0 for each in seen.inputs)


def division_with_tiny_eps(seen: Evidence) -> bool:
    """A divisor whose eps is 0 in float16."""
    return seen.operation in DIVISIONS and _is_half(seen) and _tiny_eps(seen)


def norm_at_zero(seen: Evidence) -> bool:
    """A norm of zeros, or a division by one."""
    divided = seen.operation in DIVISIONS and _made_by(seen, NORMS, 4)
    return seen.operation in NORMS or (divided and _divisor_has_zero(seen))


def division_by_zero(seen: Evidence) -> bool:
    """A divisor that is 0 somewhere."""
    return seen.operation in DIVISIONS and _divisor_has_zero(seen)


def large_mask(seen: Evidence) -> bool:
    """A mask at the end of the range of float16."""
    # The sign of a number may be in the operation, as in x - 65504.
    numbers = [-abs(constant) for constant in seen.constants]
    numbers += [each.low for each in seen.inputs]
    places = {"add", "sub", "mul", "masked_fill", "where", "rsub", "to_copy", "add_"}
    if seen.operation not in places or not _is_half(seen):
        return False
    return seen.direction == "forward" and any(
        number <= LARGE_MASK for number in numbers
    )


def masked_row(seen: Evidence) -> bool:
    """A softmax made NaN of a row that was -inf."""
    attends = seen.operation in SOFTMAXES or "dot_product" in seen.operation
    return attends and seen.kind == "nan" and seen.inf_before


def half_norm(seen: Evidence) -> bool:
    """A normalisation, or a mean of squares, in float16."""
    squares = _made_by(seen, {"pow", "square"}, 1)
    of_squares = seen.operation in {"mean", "sum"} and squares
    inside = "Norm" in seen.module and seen.operation in {"pow", "square"}
    known = seen.operation in NORMALISATIONS or of_squares or inside
    return known and _is_half(seen) and seen.direction == "forward"


def sqrt_at_zero(seen: Evidence) -> bool:
    """The gradient of a root at 0."""
    root = seen.operation == "sqrt" or (
        seen.operation == "pow" and any(0.0 < c < 1.0 for c in seen.constants)
    )
    # Backward may not know the input: nowhere else is the gradient of a root infinite.
    at_zero = not seen.inputs or any(each.low == 0.0 for each in seen.inputs)
    return root and seen.direction == "backward" and at_zero


def negative_base(seen: Evidence) -> bool:
    """A root or a broken power of a negative number."""
    negative = any(each.low < 0.0 for each in seen.inputs)
    return seen.operation in {"pow", "sqrt"} and seen.kind == "nan" and negative


def power_overflow(seen: Evidence) -> bool:
    """A power that left the range."""
    return seen.operation in {"pow", "square"} and seen.kind == "inf"


def exp_overflow(seen: Evidence) -> bool:
    """An exponential that left the range."""
    return seen.operation in EXPONENTIALS and seen.kind == "inf"


def arc_at_one(seen: Evidence) -> bool:
    """An arc function at the end of its domain."""
    return seen.operation in ARCS


def bce_on_probabilities(seen: Evidence) -> bool:
    """The cross entropy of probabilities, not of scores."""
    return seen.operation == "binary_cross_entropy"


def half_sum(seen: Evidence) -> bool:
    """A sum in float16."""
    return seen.operation in SUMS and _is_half(seen) and seen.direction == "forward"


def half_product(seen: Evidence) -> bool:
    """A matrix product or convolution in float16."""
    product = seen.operation in PRODUCTS or "dot_product" in seen.operation
    return product and _is_half(seen) and seen.direction == "forward"


def cast(seen: Evidence) -> bool:
    """A cast to float16."""
    casts = seen.operation in {"to_copy", "copy"}
    return casts and _is_half(seen) and seen.direction == "forward"


def _is_half(seen: Evidence) -> bool:
    return seen.dtype == HALF


def _made_by(seen: Evidence, operations: set[str], within: int) -> bool:
    return any(maker.operation in operations for maker in seen.makers[:within])


def _tiny_eps(seen: Evidence) -> bool:
    adding = {"add", "clamp", "clamp_min", "maximum"}
    return any(
        0.0 < constant < SMALLEST_HALF
        for maker in seen.makers
        if maker.operation in adding
        for constant in maker.constants
    )


def _divisor_has_zero(seen: Evidence) -> bool:
    # The last input is the divisor; reciprocal and rsqrt have only that one.
    return bool(seen.inputs) and seen.inputs[-1].low <= 0.0 <= seen.inputs[-1].high
