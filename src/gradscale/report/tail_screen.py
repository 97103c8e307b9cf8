"""The screen of `gradscale tail`: a run in progress."""

import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradscale.core.formatting import power
from gradscale.diagnosis.following import Follower
from gradscale.judge.trend import TOP, exponent
from gradscale.report.chart import mark_legend, scale_chart
from gradscale.report.run_screen import HEALTH_STYLE
from gradscale.report.style import (
    VERDICT_STYLES,
    headroom,
    thousands,
    verdict_name,
)

# Findings shown below the chart.
MAX_FINDINGS = 3
# Window of the count of recent skips, in steps.
RECENT = 100
# Seconds without a new step after which the run may have been killed.
SILENT = 30.0


def tail_screen(
    follower: Follower,
    name: str,
    width: int,
    *,
    braille: bool = True,
    now: Callable[[], float] = time.time,
) -> Group:
    """Return the screen of `gradscale tail`.

    Args:
        follower: Reads the run.
        name: File name.
        width: Terminal width in characters.
        braille: Draw with Braille dots instead of stars.
        now: Clock for the time since the last step.
    """
    state = _state(follower, now())
    title = Text.assemble(
        (name, "bold"),
        "  ",
        (str(follower.health), HEALTH_STYLE[follower.health]),
        (f"  {state}", "dim"),
    )
    if follower.last is None:
        return Group(title, Text("no steps yet", style="dim"))
    parts: list[RenderableType] = [title, _vitals(follower), ""]
    timeline = follower.timeline
    parts.append(scale_chart(timeline, width, height=8, braille=braille))
    parts.append(Text("        ") + mark_legend(timeline))
    found = [finding for finding in follower.findings if not finding.normal]
    for finding in found[-MAX_FINDINGS:]:
        text = f"{finding.code} step {finding.step}: {finding.what}"
        parts.append(Text(text, style="bold red" if finding.hopeless else "yellow"))
    if found:
        parts.append(Text(f"Advice: gradscale doctor {name}", style="dim"))
    return Group(*parts)


def vitals(follower: Follower) -> dict[str, str]:
    """Return the formatted values of the last step by name."""
    row = follower.last
    assert row is not None
    marks = follower.timeline
    begin = max(marks.first, row.step - RECENT + 1)
    recent, of = marks.skips(begin, row.step), row.step - begin + 1
    shown = {
        "step": thousands(row.step),
        "scale": power(row.scale),
        "skipped": f"{thousands(follower.skipped)}, {recent} of the last {of}",
    }
    if row.amax and row.applied:
        shown["headroom"] = headroom(TOP - exponent(row.amax))
    if row.norm is not None:
        shown["norm"] = f"{row.norm:.4g}"
    if row.loss is not None:
        shown["loss"] = f"{row.loss:.4g}"
    return shown


def _vitals(follower: Follower) -> RenderableType:
    shown = vitals(follower)
    table = Table.grid(padding=(0, 3))
    table.add_row(*(Text(name, style="dim") for name in shown), Text("last", "dim"))
    table.add_row(*shown.values(), _last(follower))
    return table


def _last(follower: Follower) -> Text:
    """Return the last verdict other than ok, with its step."""
    mark = follower.timeline.last_mark()
    if mark is None:
        return Text("ok", style="green")
    style = VERDICT_STYLES[mark.verdict].style
    return Text(f"{verdict_name(mark.verdict)} at {thousands(mark.step)}", style=style)


def _state(follower: Follower, now: float) -> str:
    if follower.ended:
        return "ended"
    if follower.last is None:
        return "waiting"
    silent = now - follower.last.time
    return f"no new step for {silent:.0f} s" if silent > SILENT else "running"
