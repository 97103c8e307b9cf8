"""The table of gradient elements lost to underflow, by tensor and scale."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gradscale.core.formatting import counted, percent, power
from gradscale.diagnosis.underflow import SHIFTS, Lost, Underflow
from gradscale.judge.findings import Finding
from gradscale.report.columns import Cell, Column, fitted_table
from gradscale.report.style import fixed_percent, thousands

# Maximum rows; the rest is summarised as a count. Half are for all-zero tensors.
MAX_ROWS = 10
# On a narrow terminal the column with the highest number is dropped first. Other scales
# are given in bits from the current one.
_FIGURES = (Column("zero", 2), Column("subnormal", 3), Column("lost now"))
_PRIORITY_OF_SHIFT = {-8: 6, 8: 5, -4: 4, 4: 1}
# Names keep up to this width; a column is dropped first.
_MIN_NAME = 28
_ALL = "all tensors"


def underflow_parts(
    underflow: Underflow, width: int, findings: Sequence[Finding] = ()
) -> list[RenderableType]:
    """Return a table of the losses at this and other scales, with advice below.

    Args:
        underflow: The last sample of the run.
        width: In characters.
        findings: Of the run; their advice is not repeated.
    """
    empty = [lost for lost in underflow.tensors if lost.empty]
    others = [lost for lost in underflow.tensors if not lost.empty]
    zero_rows = max(MAX_ROWS // 2, MAX_ROWS - len(others))
    # "… 1 more" would take as many lines as the row itself.
    zero_rows += len(empty) == zero_rows + 1
    shown = others[: MAX_ROWS - min(len(empty), zero_rows)]
    columns = [
        *_FIGURES,
        *(Column(_scale(underflow, s), _PRIORITY_OF_SHIFT[s]) for s in SHIFTS),
    ]
    rows = [_row(lost) for lost in (underflow.whole, *empty[:zero_rows])]
    if len(empty) > zero_rows:
        more = f"… {thousands(len(empty) - zero_rows)} more all-zero"
        rows.append([Text(more, style="dim"), fixed_percent(1.0)])
    rows += [_row(lost) for lost in shown]
    table = fitted_table("tensor", columns, rows, width, short_name=_MIN_NAME)
    parts: list[RenderableType] = [_heading(underflow), table]
    left = len(others) - len(shown)
    if left > 0:
        more = f"and {counted(left, 'tensor')} with no larger loss"
        parts.append(Text(more, style="dim"))
    return [
        *parts,
        *(Text(_sentence(text)) for text in _conclusions(underflow, findings)),
    ]


def _heading(underflow: Underflow) -> Text:
    text = (
        f"Step {thousands(underflow.step)}, S = {power(underflow.scale)}. Lost: share "
        "of truly non-zero elements too small for float16."
    )
    if underflow.whole.flushed:
        text += "\n~ estimate"
        text += ", ? unknown" if len(underflow.whole.at) < len(SHIFTS) else ""
    return Text(text, style="dim")


def _conclusions(underflow: Underflow, findings: Sequence[Finding]) -> list[str]:
    said = [underflow.advice]
    if any(finding.code == "GS209" for finding in findings):
        said = [
            f"about {percent(underflow.whole.lost)} of the elements are lost at "
            f"S = {power(underflow.scale)}; see GS209 below"
        ]
    if idle := sum(lost.empty and not lost.flushed for lost in underflow.tensors):
        have = "gradient has" if idle == 1 else "gradients have"
        said.append(
            f"{thousands(idle)} {have} only zeros at a scale that flushes little: the "
            "loss does not depend on these tensors, for example because of a "
            "saturated softmax or a zero factor"
        )
    return said


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _scale(underflow: Underflow, shift: int) -> str:
    return f"at {power(underflow.scale * 2.0**shift)}"


def _row(lost: Lost) -> list[Cell]:
    name = Text(lost.tensor) if lost.tensor else Text(_ALL, "bold")
    zeros, estimated = fixed_percent(lost.zeros), lost.flushed > 0.0
    if lost.empty and not estimated:
        return [name, zeros, *[_dim("–")] * (2 + len(SHIFTS))]
    cells = [
        _share(lost.at[shift], estimated or shift > 0)
        if shift in lost.at
        else _dim("?")
        for shift in SHIFTS
    ]
    subnormal = _dim("–") if lost.empty else Text(fixed_percent(lost.subnormal))
    return [name, zeros, subnormal, _share(lost.lost, estimated), *cells]


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def _share(share: float | None, estimated: bool) -> Text:
    if share is None:
        return Text("overflow", style="dim")
    text = f"~{percent(share)}" if estimated and share > 0.0 else fixed_percent(share)
    return Text(text, style="yellow" if share >= 0.01 else "")
