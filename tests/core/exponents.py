"""What the tests of the underflow arithmetic stand on: histograms, and float16."""

import math
import struct

from gradscale.core.exponent_histogram import Histogram

LOWEST, BINS = -43, 59


def histogram(numbers, scale=1.0, lowest=LOWEST, bins=BINS):
    """Return the histogram of numbers, counted one by one."""
    counts = [0] * bins
    zeros = deep = above = nonfinite = 0
    for number in numbers:
        place = math.frexp(number)[1] - 1 - lowest
        if not math.isfinite(number):
            nonfinite += 1
        elif number == 0.0:
            zeros += 1
        elif place < 0:
            deep += 1
        elif place >= bins:
            above += 1
        else:
            counts[place] += 1
    return Histogram(scale, zeros, deep, lowest, tuple(counts), above, nonfinite)


def octaves(counts, scale=1.0, **others):
    """Return a histogram from counts by exponent."""
    bins = tuple(counts.get(LOWEST + place, 0) for place in range(BINS))
    fields = {"zeros": 0, "deep": 0, "above": 0, "nonfinite": 0, **others}
    return Histogram(scale=scale, lowest=LOWEST, bins=bins, **fields)


def half(number):
    """Return a number rounded to float16."""
    try:
        return struct.unpack("<e", struct.pack("<e", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
