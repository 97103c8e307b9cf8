"""The scale of a run as a terminal chart."""

import math
from collections import Counter
from typing import NamedTuple

from rich.text import Text

from gradscale.core.records import Verdict
from gradscale.diagnosis.timeline import Timeline
from gradscale.judge.verdict_table import BY_VERDICT, Skip
from gradscale.report.style import BY_SEVERITY, VERDICT_STYLES, thousands, verdict_name

# Bit of each dot of a Braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_GUTTER = 8
# Minimum range in powers of two: a constant scale is drawn mid-chart, not at an edge.
_MIN_RANGE = 6


class _Axes(NamedTuple):
    tick: str
    left: str
    corner: str
    bottom: str


_LINES = _Axes("┤", "│", "└", "─")
_ASCII = _Axes("+", "|", "+", "-")


def scale_chart(
    timeline: Timeline, width: int, height: int = 12, *, braille: bool = True
) -> Text:
    """Draw log2 of the scale against steps, with a row of verdict letters below.

    Args:
        timeline: Of a run with at least one step.
        width: Terminal width in characters.
        height: Maximum lines, without axis.
        braille: Draw with Braille dots, eight to a character; otherwise in ASCII.
    """
    columns = max(10, width - _GUTTER - 1)
    low, high, height = _bounds(timeline, height)
    axes = _LINES if braille else _ASCII
    chart = Text()
    for line, cells in enumerate(_cells(timeline, columns, height, low, high, braille)):
        label = _label(line, height, low, high)
        chart.append(f"{label:>6} ", style="dim")
        chart.append(axes.tick if label else axes.left, style="dim")
        chart.append(cells.rstrip() + "\n", style="bold blue")
    chart.append(f"{'':>6} {axes.corner}{axes.bottom * columns}\n", style="dim")
    _append_marks(chart, timeline, columns)
    first, last = thousands(timeline.first), thousands(timeline.last)
    gap = max(1, columns - len(first) - len(last))
    chart.append(f"{'step':>6}  {first}{' ' * gap}{last}", style="dim")
    return chart


def mark_legend(timeline: Timeline) -> Text:
    """Return the legend of the letters below a chart; empty if it has none."""
    seen = {mark.verdict for mark in timeline.marks()}
    legend = Text()
    for verdict in BY_SEVERITY:
        if verdict in seen:
            style = VERDICT_STYLES[verdict]
            legend.append("  " if legend.plain else "")
            legend.append(style.letter, style=style.style)
            legend.append(f" {verdict_name(verdict)}", style="dim")
    return legend


def _bounds(timeline: Timeline, height: int) -> tuple[int, int, int]:
    """Return lowest and highest exponent, and lines, each of equally many exponents."""
    lowest, highest = timeline.range()
    low, high = math.floor(lowest), math.ceil(highest)
    spare = max(0, _MIN_RANGE - (high - low))
    low, high = low - (spare + 1) // 2, high + spare // 2
    per_line = math.ceil((high - low + 1) / height)
    height = math.ceil((high - low + 1) / per_line)
    return high - height * per_line + 1, high, height


def _label(line: int, height: int, low: int, high: int) -> str:
    per_line = (high - low + 1) // height
    return f"2^{high - line * per_line}" if line % 2 == 0 else ""


def _cells(
    timeline: Timeline, columns: int, height: int, low: int, high: int, braille: bool
) -> list[str]:
    wide, tall = (2, 4) if braille else (1, 1)
    dots = [[0] * columns for _ in range(height)]
    rows = height * tall
    previous: int | None = None
    for piece, (least, most) in enumerate(timeline.columns(columns * wide)):
        top, bottom = (_row(value, low, high, rows) for value in (most, least))
        # Extended to the end of the previous piece, so that a jump is one line.
        if previous is not None:
            top, bottom = min(top, previous), max(bottom, previous)
        for row in range(top, bottom + 1):
            line, part = divmod(row, tall)
            dots[line][piece // wide] |= _DOTS[part][piece % wide] if braille else 1
        end = timeline.at(_last_step(timeline, piece, columns * wide))
        previous = _row(end, low, high, rows)
    return [
        "".join(chr(_BLANK + cell) if braille else " *"[cell] for cell in line).replace(
            chr(_BLANK), " "
        )
        for line in dots
    ]


def _last_step(timeline: Timeline, piece: int, pieces: int) -> int:
    """Return the last step of one of `pieces` equal parts of the timeline."""
    span = timeline.last - timeline.first + 1
    begin = timeline.first + span * piece // pieces
    return max(begin, timeline.first + span * (piece + 1) // pieces - 1)


def _row(value: float, low: int, high: int, rows: int) -> int:
    """Return the dot row of a log2 value, 0 at the top; integers are mid-line."""
    share = (high + 0.5 - value) / (high - low + 1)
    return min(rows - 1, max(0, int(share * rows)))


def _append_marks(chart: Text, timeline: Timeline, columns: int) -> None:
    """Append the letters of the columns with verdicts other than ok."""
    seen: dict[int, Counter[Verdict]] = {}
    span = timeline.last - timeline.first + 1
    for mark in timeline.marks():
        column = (mark.step - timeline.first) * columns // span
        seen.setdefault(column, Counter())[mark.verdict] += 1
    if not seen:
        return
    chart.append(" " * _GUTTER)
    for column in range(max(seen) + 1):
        if column in seen:
            style = VERDICT_STYLES[_representative(seen[column])]
            chart.append(style.letter, style=style.style)
        else:
            chart.append(" ")
    chart.append("\n")


def _representative(verdicts: Counter[Verdict]) -> Verdict:
    """Return the most severe verdict; of ordinary skips, the most frequent."""
    worst = min(verdicts, key=BY_SEVERITY.index)
    ordinary = BY_VERDICT[worst].skip is Skip.SCALE
    return verdicts.most_common(1)[0][0] if ordinary else worst
