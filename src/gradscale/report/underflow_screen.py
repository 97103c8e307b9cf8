"""What the scale of a run loses at the small end, as a table for the terminal."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gradscale.core.formatting import percent as about
from gradscale.core.formatting import power
from gradscale.diagnosis.underflow import SHIFTS, Lost, Underflow
from gradscale.judge.findings import Finding
from gradscale.report.columns import columns_of, shortened
from gradscale.report.demo_table import percent
from gradscale.report.style import shown_step

# Rows beyond which only their number is told; half of them for tensors of zeros.
MOST = 10
# Other scales that are shown, less of them where the terminal is narrow.
_CHOICES = (SHIFTS, (-4, 4, 8), (-4, 4), (4,))
_FIGURES = ("zero", "subnormal", "lost now")
# What a figure takes, "overflow" say, and the distance of two columns.
_WIDE, _APART, _INDENT = 8, 3, 2
# As much of a name is shown before a scale is left out for it.
_READABLE = 28


def underflow_parts(
    underflow: Underflow, width: int, findings: Sequence[Finding] = ()
) -> list[RenderableType]:
    """Return what the scale loses, and what another would, as table and words.

    Args:
        underflow: What there is to show.
        width: Of the terminal.
        findings: Of the run: advice that is among them is not given twice.
    """
    empty = [lost for lost in underflow.tensors if lost.empty]
    others = [lost for lost in underflow.tensors if not lost.empty]
    crowd = max(MOST // 2, MOST - len(others))
    # A line that tells of one more takes no less room than that one.
    crowd += len(empty) == crowd + 1
    shown = others[: MOST - min(len(empty), crowd)]
    names = [lost.tensor for lost in (*empty[:crowd], *shown)]
    longest = max(len("all together"), *map(len, names))
    shifts, room = _fitting(underflow, width, longest)
    table = columns_of("tensor", *(f">{each}" for each in _FIGURES))
    for shift in shifts:
        table.add_column(_scale(underflow, shift), justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for lost in (underflow.whole, *empty[:crowd]):
        table.add_row(*_row(lost, shifts, room))
    if len(empty) > crowd:
        more = f"… {shown_step(len(empty) - crowd)} more of zeros"
        table.add_row(Text(more, style="dim"), percent(1.0))
    for lost in shown:
        table.add_row(*_row(lost, shifts, room))
    parts: list[RenderableType] = [_heading(underflow), table]
    left = len(others) - len(shown)
    if left > 0:
        parts.append(Text(f"and {left} tensors that lose no more", style="dim"))
    return [*parts, *(Text(_sentence(said)) for said in _reading(underflow, findings))]


def _heading(underflow: Underflow) -> Text:
    said = (
        f"Step {shown_step(underflow.step)}, S = {power(underflow.scale)}. Lost: too "
        "small for float16, of what is not truly 0."
    )
    if underflow.whole.flushed:
        said += "\n~ is an estimate"
        said += ", ? is not known." if len(underflow.whole.at) < len(SHIFTS) else "."
    return Text(said, style="dim")


def _reading(underflow: Underflow, findings: Sequence[Finding]) -> list[str]:
    said = [underflow.advice]
    if any(finding.code == "GS209" for finding in findings):
        said = [
            f"about {about(underflow.whole.lost)} of the elements are lost at "
            f"S = {power(underflow.scale)}; GS209 below says what to try"
        ]
    if idle := sum(lost.empty and not lost.flushed for lost in underflow.tensors):
        gets = "tensor gets" if idle == 1 else "tensors get"
        said.append(
            f"{shown_step(idle)} {gets} only zeros, at a scale that flushes little: "
            "the loss does not depend on them, as behind a saturated softmax or a "
            "factor that is 0"
        )
    return said


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _fitting(
    underflow: Underflow, width: int, longest: int
) -> tuple[tuple[int, ...], int]:
    """Return the scales that fit beside the names, and the room that names get."""
    for shifts in _CHOICES:
        titles = [*_FIGURES, *(_scale(underflow, shift) for shift in shifts)]
        taken = sum(max(len(title), _WIDE) + _APART for title in titles)
        room = width - _INDENT - taken
        if room >= min(longest, _READABLE):
            break
    return shifts, max(room, len("all together"))


def _scale(underflow: Underflow, shift: int) -> str:
    return f"at {power(underflow.scale * 2.0**shift)}"


def _row(lost: Lost, shifts: Sequence[int], room: int) -> list[RenderableType]:
    name = Text(shortened(lost.tensor, room)) if lost.tensor else _ALL
    zeros, guessed = percent(lost.zeros), lost.flushed > 0.0
    if lost.empty and not guessed:
        return [name, zeros, *[_sign("–")] * (2 + len(shifts))]
    cells = [
        _share(lost.at[shift], guessed or shift > 0) if shift in lost.at else _sign("?")
        for shift in shifts
    ]
    subnormal = _sign("–") if lost.empty else Text(percent(lost.subnormal))
    return [name, zeros, subnormal, _share(lost.lost, guessed), *cells]


def _sign(sign: str) -> Text:
    return Text(sign, style="dim")


_ALL = Text("all together", style="bold")


def _share(share: float | None, guessed: bool) -> Text:
    if share is None:
        return Text("overflow", style="dim")
    told = f"~{about(share)}" if guessed and share > 0.0 else percent(share)
    return Text(told, style="yellow" if share >= 0.01 else "")
