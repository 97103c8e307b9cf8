"""Known unsafe patterns of half precision, each with the form that is safe."""

from collections.abc import Callable
from typing import NamedTuple

from gradscale.judge import evidence
from gradscale.judge.evidence import Evidence


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

    >>> before = (evidence.Maker("softmax"),)
    >>> recognise(Evidence("log", "forward", "inf", "float16", makers=before)).name
    'log_of_softmax'
    """
    for holds, pattern in PATTERNS:
        if holds(seen):
            return pattern
    return None


# The more particular comes before the more general.
PATTERNS: tuple[tuple[Callable[[Evidence], bool], Pattern], ...] = (
    (
        evidence.masked_row,
        Pattern(
            "masked_row",
            "A row of the softmax is masked everywhere: all its scores are -inf, and "
            "-inf minus -inf is NaN.",
            "Leave one place of every row open, or mask with a finite number such as "
            "-1e4 and set the masked rows of the result to 0.",
        ),
    ),
    (
        evidence.log_of_softmax,
        Pattern(
            "log_of_softmax",
            "A softmax rounds small probabilities to 0, and log(0) is -inf.",
            "Use torch.nn.functional.log_softmax, or cross_entropy on the scores.",
        ),
    ),
    (
        evidence.log_of_sigmoid,
        Pattern(
            "log_of_sigmoid",
            "A sigmoid rounds small probabilities to 0, and log(0) is -inf.",
            "Use torch.nn.functional.logsigmoid, or "
            "binary_cross_entropy_with_logits on the scores.",
        ),
    ),
    (
        evidence.rounds_to_one,
        Pattern(
            "rounds_to_one",
            "A bound such as 1 - 1e-6 is 1 in float16, whose step below 1 is 2^-11, so "
            "the value it should keep away from 1 arrives there.",
            "Take the bound and what follows in float32, or use 1 - 1e-3.",
        ),
    ),
    (
        evidence.log_with_tiny_eps,
        Pattern(
            "log_with_tiny_eps",
            "The eps inside the logarithm is below 6e-8 and is 0 in float16: log(0) is "
            "-inf.",
            "Take it in float32 with an eps of at least 1e-4, whose inverse is the "
            "largest gradient: torch.log(x.float() + 1e-4).",
        ),
    ),
    (
        evidence.log_at_zero,
        Pattern(
            "log_at_zero",
            "The logarithm of 0 is -inf and that of a negative number NaN; so is its "
            "gradient.",
            "Take it in float32 of x.clamp(min=1e-4): the gradient is the inverse.",
        ),
    ),
    (
        evidence.division_with_tiny_eps,
        Pattern(
            "division_with_tiny_eps",
            "The eps of the divisor is below 6e-8 and is 0 in float16: the division is "
            "by 0.",
            "Divide in float32 with an eps of at least 1e-3: the gradient grows as its "
            "inverse squared.",
        ),
    ),
    (
        evidence.norm_at_zero,
        Pattern(
            "norm_at_zero",
            "A vector of zeros has norm 0: dividing by it, or its gradient, is 0 / 0.",
            "Use x / (norm + eps) in float32, or torch.nn.functional.normalize on "
            "x.float().",
        ),
    ),
    (
        evidence.large_mask,
        Pattern(
            "large_mask",
            "A mask of -65504 or beyond leaves float16 no room: with the score added "
            "it is -inf.",
            "Mask with -1e4, or masked_fill with -inf and no row masked everywhere, or "
            "add the mask in float32.",
        ),
    ),
    (
        evidence.half_norm,
        Pattern(
            "half_norm",
            "The squares inside a normalisation leave float16 from 256 on.",
            "Normalise in float32: layer(x.float()).to(x.dtype), or let autocast do "
            "it and keep the layer's weights in float32.",
        ),
    ),
    (
        evidence.sqrt_at_zero,
        Pattern(
            "sqrt_at_zero",
            "The gradient of a square root at 0 is infinite, and NaN once multiplied "
            "by 0.",
            "Use torch.sqrt(x + eps) or torch.sqrt(x.clamp(min=eps)) in float32.",
        ),
    ),
    (
        evidence.negative_base,
        Pattern(
            "negative_base",
            "A root or a broken power of a negative number is NaN.",
            "Use x.clamp(min=0), or x.abs() if the sign does not matter.",
        ),
    ),
    (
        evidence.arc_at_one,
        Pattern(
            "arc_at_one",
            "acos, asin and atanh have an infinite slope at 1 and -1, and rounding "
            "brings values there, or past it.",
            "Take them in float32 of x.clamp(-1 + 1e-6, 1 - 1e-6), or use atan2.",
        ),
    ),
    (
        evidence.bce_on_probabilities,
        Pattern(
            "bce_on_probabilities",
            "binary_cross_entropy divides by p * (1 - p), which is 0 for a "
            "probability that was rounded to 0 or 1.",
            "Use binary_cross_entropy_with_logits on the scores.",
        ),
    ),
    (
        evidence.division_by_zero,
        Pattern(
            "division_by_zero",
            "The divisor is 0 somewhere.",
            "Keep it away from 0 in float32: x / y.float().clamp(min=eps).",
        ),
    ),
    (
        evidence.power_overflow,
        Pattern(
            "power_overflow",
            "A power leaves the range: the square of 256 is already beyond float16.",
            "Take the power in float32, or divide before it.",
        ),
    ),
    (
        evidence.exp_overflow,
        Pattern(
            "exp_overflow",
            "exp(11.1) is beyond float16 and exp(88.8) beyond float32.",
            "Subtract the largest exponent first, use logsumexp or softmax, or clamp "
            "the exponent.",
        ),
    ),
    (
        evidence.half_sum,
        Pattern(
            "half_sum",
            "A sum over many float16 elements, or its running form, passes 65504.",
            "Pass dtype=torch.float32 to the sum, or take the mean of x.float().",
        ),
    ),
    (
        evidence.half_product,
        Pattern(
            "half_product",
            "The products are summed in float32, and the result is beyond 65504 when "
            "it is stored as float16.",
            "Run this module in float32 or bfloat16, or make its inputs or weights "
            "smaller by a factor that is given back later.",
        ),
    ),
    (
        evidence.cast,
        Pattern(
            "cast_overflow",
            "A value beyond 65504 was cast to float16.",
            "Keep it in float32, or cast to bfloat16.",
        ),
    ),
)
