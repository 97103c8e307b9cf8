"""The scale of a run as a chart of characters."""

import math
from collections import Counter

from rich.text import Text

from gradscale.core.records import Verdict
from gradscale.diagnosis.timeline import Timeline
from gradscale.judge.verdict_table import BY_VERDICT, Skip
from gradscale.report.style import LOOKS, ORDER, named, shown_step

# The dots of a Braille character, by row and column within it.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_GUTTER = 8
# Powers of two that are shown at least: a scale that stands still is not at an edge.
_LEAST = 6


def scale_chart(
    timeline: Timeline, width: int, height: int = 12, *, braille: bool = True
) -> Text:
    """Draw log2 of the scale against steps, and below it what was not ok.

    Args:
        timeline: Of a run with at least one step.
        width: Of the terminal, in characters.
        height: Of the chart without its axis, in characters, at most.
        braille: Draw with dots, eight to a character; with stars if not.
    """
    columns = max(10, width - _GUTTER - 1)
    low, high, height = _bounds(timeline, height)
    chart = Text()
    for line, cells in enumerate(_cells(timeline, columns, height, low, high, braille)):
        label = _label(line, height, low, high)
        chart.append(f"{label:>6} ", style="dim")
        chart.append("┤" if label else "│", style="dim")
        chart.append(cells.rstrip() + "\n", style="bold blue")
    _append_marks(chart, timeline, columns)
    first, last = shown_step(timeline.first), shown_step(timeline.last)
    gap = max(1, columns - len(first) - len(last))
    chart.append(f"{'step':>6}  {first}{' ' * gap}{last}", style="dim")
    return chart


def mark_legend(timeline: Timeline) -> Text:
    """Return what the letters below a chart mean; empty if there are none."""
    seen = {mark.verdict for mark in timeline.marks()}
    legend = Text()
    for verdict in ORDER:
        if verdict in seen:
            look = LOOKS[verdict]
            legend.append("  " if legend.plain else "")
            legend.append(look.letter, style=look.style)
            legend.append(f" {named(verdict)}", style="dim")
    return legend


def _bounds(timeline: Timeline, height: int) -> tuple[int, int, int]:
    """Return the powers of two at both ends, and the lines: so many powers a line."""
    lowest, highest = timeline.range()
    low, high = math.floor(lowest), math.ceil(highest)
    spare = max(0, _LEAST - (high - low))
    low, high = low - (spare + 1) // 2, high + spare // 2
    a_line = math.ceil((high - low + 1) / height)
    height = math.ceil((high - low + 1) / a_line)
    return high - height * a_line + 1, high, height


def _label(line: int, height: int, low: int, high: int) -> str:
    a_line = (high - low + 1) // height
    return f"2^{high - line * a_line}" if line % 2 == 0 else ""


def _cells(
    timeline: Timeline, columns: int, height: int, low: int, high: int, braille: bool
) -> list[str]:
    wide, tall = (2, 4) if braille else (1, 1)
    dots = [[0] * columns for _ in range(height)]
    rows = height * tall
    before: int | None = None
    for place, (least, most) in enumerate(timeline.columns(columns * wide)):
        top, bottom = (_row(value, low, high, rows) for value in (most, least))
        # Joined to the column before it, so that a jump is a line.
        if before is not None:
            top, bottom = min(top, before), max(bottom, before)
        for row in range(top, bottom + 1):
            line, part = divmod(row, tall)
            dots[line][place // wide] |= _DOTS[part][place % wide] if braille else 1
        before = _row(
            timeline.at(_end(timeline, place, columns * wide)), low, high, rows
        )
    return [
        "".join(chr(_BLANK + cell) if braille else " *"[cell] for cell in line).replace(
            chr(_BLANK), " "
        )
        for line in dots
    ]


def _end(timeline: Timeline, place: int, pieces: int) -> int:
    """Return the last step of a piece of the timeline."""
    span = timeline.last - timeline.first + 1
    begin = timeline.first + span * place // pieces
    return max(begin, timeline.first + span * (place + 1) // pieces - 1)


def _row(value: float, low: int, high: int, rows: int) -> int:
    """Return the row of dots of a value, 0 at the top; powers sit mid-line."""
    share = (high + 0.5 - value) / (high - low + 1)
    return min(rows - 1, max(0, int(share * rows)))


def _append_marks(chart: Text, timeline: Timeline, columns: int) -> None:
    """Append the axis, and under it a letter for each column that was not ok."""
    chart.append(f"{'':>6} └{'─' * columns}\n", style="dim")
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
            look = LOOKS[_told(seen[column])]
            chart.append(look.letter, style=look.style)
        else:
            chart.append(" ")
    chart.append("\n")


def _told(verdicts: Counter[Verdict]) -> Verdict:
    """Return the gravest verdict; of ordinary skips, the most frequent."""
    gravest = min(verdicts, key=ORDER.index)
    ordinary = BY_VERDICT[gravest].skip is Skip.SCALE
    return verdicts.most_common(1)[0][0] if ordinary else gravest
