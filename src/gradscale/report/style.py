"""How verdicts look, on the terminal and in figures alike."""

from typing import NamedTuple

from gradscale.core.records import Verdict


class Look(NamedTuple):
    """How one verdict looks.

    Attributes:
        letter: In a terminal chart, legible without colour.
        style: On the terminal.
        colour: In a figure; Okabe and Ito's, told apart in every kind of colour
            vision.
        shape: In a figure.
    """

    letter: str
    style: str
    colour: str
    shape: str


# The gravest first: of several verdicts in one place of a chart, it is shown.
LOOKS = {
    Verdict.WEIGHTS_NONFINITE: Look("W", "bold red", "#000000", "diamond"),
    Verdict.COLLAPSE: Look("C", "bold red", "#D55E00", "triangle-down"),
    Verdict.FORWARD_NONFINITE: Look("F", "bold red", "#CC79A7", "square"),
    Verdict.GENUINE: Look("G", "bold red", "#D55E00", "cross"),
    Verdict.UNDERFLOW: Look("u", "yellow", "#E69F00", "triangle-down"),
    Verdict.LOSS_OVERFLOW: Look("L", "yellow", "#E69F00", "square"),
    Verdict.NORM_OVERFLOW: Look("N", "yellow", "#E69F00", "diamond"),
    Verdict.NO_GRADIENTS: Look("-", "yellow", "#999999", "square"),
    Verdict.OVERFLOW: Look("o", "yellow", "#E69F00", "circle"),
    Verdict.CALIBRATING: Look("c", "cyan", "#56B4E9", "circle"),
    Verdict.PROBING: Look("p", "cyan", "#009E73", "triangle-up"),
    Verdict.OK: Look(" ", "green", "#0072B2", "circle"),
}
ORDER = tuple(LOOKS)
NORMAL = (Verdict.OK, Verdict.CALIBRATING, Verdict.PROBING)


def phase_look(name: str) -> Look:
    """Return how a phase looks that is not steady: as its verdict does.

    >>> phase_look("falling").letter, phase_look("collapse").letter
    ('o', 'C')
    """
    # A scale falls by overflow.
    by_name = {str(verdict): look for verdict, look in LOOKS.items()}
    return by_name.get(name, LOOKS[Verdict.OVERFLOW])


def named(verdict: Verdict) -> str:
    """Return a verdict as people read it.

    >>> named(Verdict.FORWARD_NONFINITE)
    'forward nonfinite'
    """
    return str(verdict).replace("_", " ")


def shown_step(step: int) -> str:
    """Return a step with its thousands apart.

    >>> shown_step(1234567)
    '1,234,567'
    """
    return f"{step:,}"


def fixed_percent(share: float) -> str:
    """Return a share with one decimal; a small one is never rounded to 0.

    Sentences about estimates use `core.formatting.percent`, with fewer digits.

    >>> fixed_percent(0.3693), fixed_percent(0.0001), fixed_percent(0.0)
    ('36.9 %', '<0.1 %', '0.0 %')
    """
    return "<0.1 %" if 0.0 < share < 0.0005 else f"{100 * share:.1f} %"
