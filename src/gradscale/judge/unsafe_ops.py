"""Known unsafe operations of half precision, each with its safe form.

The names of operations are those of PyTorch's operator library without prefix and
overload: `softmax`, `masked_fill`, `layer_norm`.
"""

from collections.abc import Callable
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


class Pattern(NamedTuple):
    """A known way to lose a value, and the form that does not.

    Attributes:
        name: Stable, for programs.
        what: One sentence: what happens.
        instead: One sentence: the safe form.
    """

    name: str
    what: str
    instead: str


def recognise(seen: Evidence) -> Pattern | None:
    """Return the first pattern that explains the evidence, None if none does. Pure.

    >>> before = (Maker("softmax"),)
    >>> recognise(Evidence("log", "forward", "inf", "float16", makers=before)).name
    'log_of_softmax'
    """
    for holds, pattern in PATTERNS:
        if holds(seen):
            return pattern
    return None


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


# The more particular comes before the more general.
PATTERNS: tuple[tuple[Callable[[Evidence], bool], Pattern], ...] = (
    (
        masked_row,
        Pattern(
            "masked_row",
            "A row of the softmax is masked everywhere: all its scores are -inf, and "
            "-inf minus -inf is NaN.",
            "Leave one place of every row open, or mask with a finite number such as "
            "-1e4 and set the masked rows of the result to 0.",
        ),
    ),
    (
        log_of_softmax,
        Pattern(
            "log_of_softmax",
            "A softmax rounds small probabilities to 0, and log(0) is -inf.",
            "Use torch.nn.functional.log_softmax, or cross_entropy on the scores.",
        ),
    ),
    (
        log_of_sigmoid,
        Pattern(
            "log_of_sigmoid",
            "A sigmoid rounds small probabilities to 0, and log(0) is -inf.",
            "Use torch.nn.functional.logsigmoid, or "
            "binary_cross_entropy_with_logits on the scores.",
        ),
    ),
    (
        rounds_to_one,
        Pattern(
            "rounds_to_one",
            "A bound such as 1 - 1e-6 is 1 in float16, whose step below 1 is 2^-11, so "
            "the value it should keep away from 1 arrives there.",
            "Take the bound and what follows in float32, or use 1 - 1e-3.",
        ),
    ),
    (
        log_with_tiny_eps,
        Pattern(
            "log_with_tiny_eps",
            "The eps inside the logarithm is below 6e-8 and is 0 in float16: log(0) is "
            "-inf.",
            "Take it in float32 with an eps of at least 1e-4, whose inverse is the "
            "largest gradient: torch.log(x.float() + 1e-4).",
        ),
    ),
    (
        log_at_zero,
        Pattern(
            "log_at_zero",
            "The logarithm of 0 is -inf and that of a negative number NaN; so is its "
            "gradient.",
            "Take it in float32 of x.clamp(min=1e-4): the gradient is the inverse.",
        ),
    ),
    (
        division_with_tiny_eps,
        Pattern(
            "division_with_tiny_eps",
            "The eps of the divisor is below 6e-8 and is 0 in float16: the division is "
            "by 0.",
            "Divide in float32 with an eps of at least 1e-3: the gradient grows as its "
            "inverse squared.",
        ),
    ),
    (
        norm_at_zero,
        Pattern(
            "norm_at_zero",
            "A vector of zeros has norm 0: dividing by it, or its gradient, is 0 / 0.",
            "Use x / (norm + eps) in float32, or torch.nn.functional.normalize on "
            "x.float().",
        ),
    ),
    (
        large_mask,
        Pattern(
            "large_mask",
            "A mask of -65504 or beyond leaves float16 no room: with the score added "
            "it is -inf.",
            "Mask with -1e4, or masked_fill with -inf and no row masked everywhere, or "
            "add the mask in float32.",
        ),
    ),
    (
        half_norm,
        Pattern(
            "half_norm",
            "The squares inside a normalisation leave float16 from 256 on.",
            "Normalise in float32: layer(x.float()).to(x.dtype), or let autocast do "
            "it and keep the layer's weights in float32.",
        ),
    ),
    (
        sqrt_at_zero,
        Pattern(
            "sqrt_at_zero",
            "The gradient of a square root at 0 is infinite, and NaN once multiplied "
            "by 0.",
            "Use torch.sqrt(x + eps) or torch.sqrt(x.clamp(min=eps)) in float32.",
        ),
    ),
    (
        negative_base,
        Pattern(
            "negative_base",
            "A root or a broken power of a negative number is NaN.",
            "Use x.clamp(min=0), or x.abs() if the sign does not matter.",
        ),
    ),
    (
        arc_at_one,
        Pattern(
            "arc_at_one",
            "acos, asin and atanh have an infinite slope at 1 and -1, and rounding "
            "brings values there, or past it.",
            "Take them in float32 of x.clamp(-1 + 1e-6, 1 - 1e-6), or use atan2.",
        ),
    ),
    (
        bce_on_probabilities,
        Pattern(
            "bce_on_probabilities",
            "binary_cross_entropy divides by p * (1 - p), which is 0 for a "
            "probability that was rounded to 0 or 1.",
            "Use binary_cross_entropy_with_logits on the scores.",
        ),
    ),
    (
        division_by_zero,
        Pattern(
            "division_by_zero",
            "The divisor is 0 somewhere.",
            "Keep it away from 0 in float32: x / y.float().clamp(min=eps).",
        ),
    ),
    (
        power_overflow,
        Pattern(
            "power_overflow",
            "A power leaves the range: the square of 256 is already beyond float16.",
            "Take the power in float32, or divide before it.",
        ),
    ),
    (
        exp_overflow,
        Pattern(
            "exp_overflow",
            "exp(11.1) is beyond float16 and exp(88.8) beyond float32.",
            "Subtract the largest exponent first, use logsumexp or softmax, or clamp "
            "the exponent.",
        ),
    ),
    (
        half_sum,
        Pattern(
            "half_sum",
            "A sum over many float16 elements, or its running form, passes 65504.",
            "Pass dtype=torch.float32 to the sum, or take the mean of x.float().",
        ),
    ),
    (
        half_product,
        Pattern(
            "half_product",
            "The products are summed in float32, and the result is beyond 65504 when "
            "it is stored as float16.",
            "Run this module in float32 or bfloat16, or make its inputs or weights "
            "smaller by a factor that is given back later.",
        ),
    ),
    (
        cast,
        Pattern(
            "cast_overflow",
            "A value beyond 65504 was cast to float16.",
            "Keep it in float32, or cast to bfloat16.",
        ),
    ),
)
