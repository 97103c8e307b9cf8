"""How verdicts look, on the terminal and in figures alike."""

from gradscale.core.records import Verdict
from gradscale.judge.verdict_table import BY_VERDICT, Look, verdicts_where

# The lowest rank first: of several verdicts in one place of a chart, it is shown.
_UNORDERED = {verdict: row.look for verdict, row in BY_VERDICT.items() if row.look}
LOOKS = dict(sorted(_UNORDERED.items(), key=lambda pair: pair[1].rank))
ORDER = tuple(LOOKS)
NORMAL = verdicts_where(lambda row: row.normal)


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
