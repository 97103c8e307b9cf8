"""Letters, colours and number formats of the terminal screens and figures."""

from typing import NamedTuple

from gradscale.core.records import Verdict


class VerdictStyle(NamedTuple):
    """Letter, colours and shape of one verdict.

    Attributes:
        letter: Marks a step in a terminal chart; legible without colour.
        style: Rich style on the terminal.
        colour: Of the mark in a figure, from the palette of Okabe and Ito, which is
            safe for colour-blind readers.
        shape: Of the mark in a figure.
    """

    letter: str
    style: str
    colour: str
    shape: str


# Most severe first: a chart column with several verdicts shows the first of them.
VERDICT_STYLES = {
    Verdict.WEIGHTS_NONFINITE: VerdictStyle("W", "bold red", "#000000", "diamond"),
    Verdict.COLLAPSE: VerdictStyle("C", "bold red", "#D55E00", "triangle-down"),
    Verdict.FORWARD_NONFINITE: VerdictStyle("F", "bold red", "#CC79A7", "square"),
    Verdict.GENUINE: VerdictStyle("G", "bold red", "#D55E00", "cross"),
    Verdict.UNDERFLOW: VerdictStyle("u", "yellow", "#E69F00", "triangle-down"),
    Verdict.LOSS_OVERFLOW: VerdictStyle("L", "yellow", "#E69F00", "square"),
    Verdict.NORM_OVERFLOW: VerdictStyle("N", "yellow", "#E69F00", "diamond"),
    Verdict.NO_GRADIENTS: VerdictStyle("-", "yellow", "#999999", "square"),
    Verdict.OVERFLOW: VerdictStyle("o", "yellow", "#E69F00", "circle"),
    Verdict.CALIBRATING: VerdictStyle("c", "cyan", "#56B4E9", "circle"),
    Verdict.PROBING: VerdictStyle("p", "cyan", "#009E73", "triangle-up"),
    Verdict.OK: VerdictStyle(" ", "green", "#0072B2", "circle"),
}
BY_SEVERITY = tuple(VERDICT_STYLES)
NORMAL = (Verdict.OK, Verdict.CALIBRATING, Verdict.PROBING)


def phase_style(name: str) -> VerdictStyle:
    """Return the style of a phase that is not steady: that of its verdict.

    >>> phase_style("falling").letter, phase_style("collapse").letter
    ('o', 'C')
    """
    by_name = {str(verdict): style for verdict, style in VERDICT_STYLES.items()}
    # "falling" is no verdict; overflows cause it.
    return by_name.get(name, VERDICT_STYLES[Verdict.OVERFLOW])


def verdict_name(verdict: Verdict) -> str:
    """Return a verdict in words.

    >>> verdict_name(Verdict.FORWARD_NONFINITE)
    'forward nonfinite'
    """
    return str(verdict).replace("_", " ")


def thousands(count: int) -> str:
    """Return an integer with thousands separators.

    >>> thousands(1234567)
    '1,234,567'
    """
    return f"{count:,}"


def fixed_percent(share: float) -> str:
    """Return a share with one decimal; a non-zero share is never shown as 0.0 %.

    `core.formatting.percent` has fewer digits, for estimates.

    >>> fixed_percent(0.3693), fixed_percent(0.0001), fixed_percent(0.0)
    ('36.9 %', '<0.1 %', '0.0 %')
    """
    return "<0.1 %" if 0.0 < share < 0.0005 else f"{100 * share:.1f} %"
