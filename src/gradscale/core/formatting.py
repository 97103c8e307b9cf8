"""Formats scales as powers of two, shares as percentages, and text of any origin."""

import math


def power(scale: float) -> str:
    """Return a scale as a power of two if it is one.

    >>> power(65536.0), power(2.0**-24), power(1000.0)
    ('2^16', '2^-24', '1000')
    """
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def percent(share: float) -> str:
    """Return a share as a percentage with one or two significant digits.

    >>> percent(0.4129), percent(0.0312), percent(0.003), percent(1e-6), percent(0.0)
    ('41 %', '3.1 %', '0.3 %', '<0.01 %', '0 %')
    """
    if share == 0.0:
        return "0 %"
    if share < 1e-4:
        return "<0.01 %"
    if share < 0.01:
        return f"{100.0 * share:.1g} %"
    return f"{100.0 * share:.{0 if share >= 0.1 else 1}f} %"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> counted(1, "step"), counted(12345, "step")
    ('1 step', '12,345 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def run_counts(steps: int, skipped: int, idle: int = 0) -> str:
    """Return the steps of a run in words, to be followed by "recorded in".

    >>> run_counts(96, 43), run_counts(1, 0), run_counts(3, 0, 2)
    ('96 steps, 43 skipped,', '1 step', '3 steps, 2 without gradients,')

    Args:
        steps: All steps.
        skipped: Steps that were skipped although there were gradients.
        idle: Steps without gradients.
    """
    words = [f"{steps} step{'s' if steps != 1 else ''}"]
    words += [f"{skipped} skipped"] if skipped else []
    words += [f"{idle} without gradients"] if idle else []
    return ", ".join(words) + ("," if len(words) > 1 else "")


def printable(text: str) -> str:
    r"""Return a text that a terminal only prints, whatever its origin.

    Control characters, invisible ones and lone surrogates become escapes.

    >>> print(printable("head\x1b[2J.bias\n"), printable("\u202e \ud800"))
    head\x1b[2J.bias\n \u202e \ud800
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )
