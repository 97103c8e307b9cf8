"""The rows of a run file, and the encoding of their values."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

# The magnitudes of f16 have these exponents and no others: -24 to -15 are subnormal,
# -14 to 15 normal. Bin i counts magnitudes in [2^(i - 24), 2^(i - 23)).
BINS = 40
LOWEST_EXPONENT = -24
# SQLite stores a NaN as NULL, and NULL means that a value is not known.
NAN = "NaN"
# Characters of a name.
LONGEST_NAME = 10_000

# The narrowest unsigned integer that holds the largest count, by its first byte.
_WIDTHS = ((1 << 8, 1, "B"), (1 << 16, 2, "H"), (1 << 32, 4, "I"), (1 << 64, 8, "Q"))
_CODES = {width: code for _, width, code in _WIDTHS}


class StepRow(NamedTuple):
    """One step. Its fields are the columns of the table `steps`, in this order.

    Attributes:
        step: The number of the update, counted from 1.
        time: Seconds since 1970, when the row was passed to the writer.
        scale: The scale that multiplied the loss.
        applied: The optimizer step was taken.
        verdict: The code of the verdict, such as GS000.
        norm: The norm of the unscaled gradients; None if not computed.
        amax: The largest magnitude among the scaled gradients; None if not known.
        loss: The loss before it was scaled; None if not known.
    """

    step: int
    time: float
    scale: float
    applied: bool
    verdict: str
    norm: float | None
    amax: float | None
    loss: float | None


class EventRow(NamedTuple):
    """An event, such as a finding, as stored in the run file.

    Attributes:
        id: The number of the event in the file, counted from 1.
        step: The step of the event; None if it belongs to none.
        time: Seconds since 1970.
        code: Its entry in the catalogue.
        where: The dotted name of a module or parameter; None if there is none.
        data: Further facts, decoded from JSON.
    """

    id: int
    step: int | None
    time: float
    code: str
    where: str | None
    data: Any


class TensorSample(NamedTuple):
    """Counts of the underflow meter for one tensor of scaled gradients.

    `total` is the sum of all other counts but `subnormals`, which is the sum of the
    first ten bins.

    Attributes:
        total: Elements.
        zeros: Elements that are exactly 0.
        subnormals: Magnitudes that f16 holds as subnormals, in [2^-24, 2^-14).
        histogram: `BINS` counts; bin i has magnitudes in [2^(i - 24), 2^(i - 23)).
        below: Magnitudes in (0, 2^-24), which only a wider dtype than f16 holds.
        above: Finite magnitudes of 2^16 and more.
        nonfinite: inf and NaN.
    """

    total: int
    zeros: int
    subnormals: int
    histogram: Sequence[int]
    below: int = 0
    above: int = 0
    nonfinite: int = 0


class SampleRow(NamedTuple):
    """The sample of one tensor at one step, as stored in the run file.

    Attributes:
        step: The sampled step.
        tensor: The tensor's name.
        sample: Its counts.
    """

    step: int
    tensor: str
    sample: TensorSample


def stored(value: float | None) -> float | str | None:
    """Return a float as it is stored in SQLite: a NaN becomes a string.

    >>> stored(1.5), stored(float("nan")), stored(float("inf")), stored(None)
    (1.5, 'NaN', inf, None)
    """
    return value if value is None or value == value else NAN


def packed(histogram: Sequence[int]) -> bytes:
    """Pack a histogram: first bin, bytes per count, then counts, low byte first.

    Empty bins at both ends are left out. All bins empty gives an empty blob.

    >>> packed([0] * 20 + [3, 0, 500] + [0] * 17).hex(" ")
    '14 02 03 00 00 00 f4 01'
    """
    filled = [bin for bin, count in enumerate(histogram) if count]
    if not filled:
        return b""
    first, last = filled[0], filled[-1] + 1
    counts = histogram[first:last]
    largest = max(counts)
    width, code = next((w, code) for bound, w, code in _WIDTHS if largest < bound)
    return struct.pack(f"<BB{last - first}{code}", first, width, *counts)


def unpacked(blob: bytes) -> tuple[int, ...]:
    """Invert `packed`: return `BINS` counts; raise ValueError for other bytes.

    >>> unpacked(packed([0] * 20 + [3, 0, 500] + [0] * 17))[19:24]
    (0, 3, 0, 500, 0)
    """
    if not blob:
        return (0,) * BINS
    first, width = blob[0], blob[1] if len(blob) > 1 else 0
    length, rest = divmod(len(blob) - 2, width or 1)
    if width not in _CODES or rest or first + length > BINS:
        raise ValueError(f"{blob[:8].hex(' ')} begins no histogram")
    counts = struct.unpack_from(f"<{length}{_CODES[width]}", blob, 2)
    return (0,) * first + counts + (0,) * (BINS - first - length)


def storable(name: str) -> str:
    """Return a name as text that every reader accepts: valid Unicode, not too long.

    >>> storable("layer.weight"), storable("\\udc80.weight")
    ('layer.weight', '\\\\udc80.weight')
    """
    text = name.encode("utf-8", "backslashreplace").decode()
    if len(text) <= LONGEST_NAME:
        return text
    # Names that differ at their ends only stay apart.
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: LONGEST_NAME - 20]}...{digest}"
