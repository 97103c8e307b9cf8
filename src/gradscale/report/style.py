"""Letters, colours and number formats of the terminal screens and figures."""

from gradscale.core.records import Verdict
from gradscale.judge.verdict_table import BY_VERDICT, Look, verdicts_where

# Most severe first: a chart column with several verdicts shows the first of them.
_STYLES = {verdict: row.look for verdict, row in BY_VERDICT.items() if row.look}
VERDICT_STYLES = dict(sorted(_STYLES.items(), key=lambda pair: pair[1].rank))
BY_SEVERITY = tuple(VERDICT_STYLES)
NORMAL = verdicts_where(lambda row: row.normal)


def phase_style(name: str) -> Look:
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
    """Return a share with one decimal. Only 0 is shown as 0.0 %, and only 1 as 100.0 %.

    `core.formatting.percent` has fewer digits, for estimates.

    >>> fixed_percent(0.3693), fixed_percent(0.0001), fixed_percent(0.0)
    ('36.9 %', '<0.1 %', '0.0 %')
    >>> fixed_percent(0.9995), fixed_percent(0.999996), fixed_percent(1.0)
    ('99.95 %', '>99.99 %', '100.0 %')
    """
    if 0.0 < share < 0.0005:
        return "<0.1 %"
    if 0.9999 <= share < 1.0:
        return ">99.99 %"
    return f"{100 * share:.{2 if 0.9995 <= share < 1.0 else 1}f} %"


def headroom(bits: float) -> str:
    """Return the distance of the largest gradient from the largest float16.

    >>> headroom(5.04), headroom(-0.3)
    ('5.0 bits below 65504', '0.3 bits above 65504')
    """
    side = "above" if round(bits, 1) < 0.0 else "below"
    return f"{abs(bits):.1f} bits {side} 65504"
