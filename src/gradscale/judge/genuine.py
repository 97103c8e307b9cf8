"""Whether gradients are not finite at any scale, as far as a run can tell."""

from gradscale.judge.history import Course
from gradscale.judge.trend import exponent

# Gradients that stay bad over so many bits of scale are bad at any: NaN, or only
# infinity. Recorded runs drop by up to 8 bits from one batch to the next, never for
# as many steps in a row.
GENUINE_STEPS = 8
GENUINE_BITS_NAN = 8.0
GENUINE_BITS_INF = 10.0
# Before any scale has fitted, NaN may come from infinity minus infinity: the scale
# must also have gone far below 1, where losses of raw data may still fit.
GENUINE_SCALE = 2.0**-8


def is_genuine(course: Course) -> bool:
    """Tell whether the bad steps of late would be so at any scale. Pure."""
    run = course.bad
    if run.length < GENUINE_STEPS:
        return False
    bits = exponent(run.origin) - exponent(run.last)
    if course.settled:
        all_nan = run.nan == run.length
        return bits >= (GENUINE_BITS_NAN if all_nan else GENUINE_BITS_INF)
    # NaN that has turned into infinity: a lower scale does make a difference.
    better = run.nan > 0 and 0 < run.after_nan < GENUINE_STEPS
    low = run.last <= GENUINE_SCALE
    return low and bits >= GENUINE_BITS_NAN and not better
