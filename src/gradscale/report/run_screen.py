"""The screen of `gradscale report`: verdict, chart, tables and findings of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradscale.core.formatting import counted, power
from gradscale.core.records import Verdict
from gradscale.diagnosis import Diagnosis
from gradscale.diagnosis.culprits import Culprit
from gradscale.diagnosis.timeline import STEADY, Phase
from gradscale.judge.findings import Finding, Health
from gradscale.report.chart import mark_legend, scale_chart
from gradscale.report.columns import Column, fitted_table
from gradscale.report.style import (
    NORMAL,
    VERDICT_STYLES,
    fixed_percent,
    headroom,
    phase_style,
    thousands,
    verdict_name,
)
from gradscale.report.underflow_screen import underflow_parts

# Maximum rows of a table; the rest is summarised as a count.
MAX_ROWS = 10
# Characters by which a section is indented.
_INDENT = 2
_UNENDED = "still running, or killed"
HEALTH_STYLE = {
    Health.HEALTHY: "bold green",
    Health.FINDINGS: "bold yellow",
    Health.COLLAPSE: "bold red",
}


def run_screen(
    diagnosis: Diagnosis,
    width: int,
    *,
    table_width: int | None = None,
    braille: bool = True,
) -> Group:
    """Return the whole screen of `gradscale report`.

    Args:
        diagnosis: The run.
        width: Of charts and text, in characters.
        table_width: Of tables, in characters; None for `width`.
        braille: Draw with Braille dots instead of stars.
    """
    inside = (table_width or width) - _INDENT
    summary_rows = Constrain(_summary_table(diagnosis), width)
    parts: list[RenderableType] = [headline(diagnosis), summary_rows]
    if diagnosis.steps:
        chart = scale_chart(diagnosis.timeline, width, braille=braille)
        parts += ["", Text("Scale", style="bold"), chart]
        legend = mark_legend(diagnosis.timeline)
        if legend.plain:
            parts.append(Padding(legend, (0, 0, 0, 8), expand=False))
        parts += _section("Verdicts", verdict_table(diagnosis, inside))
        if len(diagnosis.phases) > 1:
            parts += _section("Phases", _phase_table(diagnosis.phases, inside))
    if diagnosis.culprits:
        parts += _section("Not finite", _culprit_table(diagnosis.culprits, inside))
    if diagnosis.underflow:
        shown = underflow_parts(diagnosis.underflow, inside, diagnosis.findings)
        parts += _section(
            "Underflow",
            *(
                Constrain(part, width - _INDENT) if isinstance(part, Text) else part
                for part in shown
            ),
        )
    found = Group(*findings(diagnosis))
    parts += _section("Findings", Constrain(found, width - _INDENT))
    return Group(*parts)


def headline(diagnosis: Diagnosis) -> Text:
    """Return the verdict on a run in one line."""
    skipped, steps = diagnosis.skipped, diagnosis.steps
    share = f" ({fixed_percent(skipped / steps)})" if steps and skipped else ""
    counts = f"{counted(steps, 'step')}, {thousands(skipped)} skipped{share}"
    if idle := diagnosis.verdicts.get(Verdict.NO_GRADIENTS, 0):
        counts += f", {thousands(idle)} without gradients"
    if _unended(diagnosis):
        counts += f", {_UNENDED}"
    nothing = "no steps yet" if _unended(diagnosis) else "no steps recorded"
    judged = diagnosis.steps or diagnosis.findings
    health = str(diagnosis.health) if judged else "not judged"
    return Text.assemble(
        (str(diagnosis.path.name), "bold"),
        "  ",
        (health, HEALTH_STYLE[diagnosis.health]),
        f"  {counts if steps else nothing}",
    )


def _unended(diagnosis: Diagnosis) -> bool:
    return bool(diagnosis.meta["end"]["state"] == "running")


def findings(diagnosis: Diagnosis) -> list[RenderableType]:
    """Return the findings as blocks, the most severe first."""
    blocks: list[RenderableType] = []
    for finding in diagnosis.findings:
        blocks += ["", _finding(finding)] if blocks else [_finding(finding)]
    if not diagnosis.serious:
        blocks = [Text(_no_findings(diagnosis)), *blocks]
    if diagnosis.not_judged:
        blocks += [Text(f"Not judged: {each}.") for each in diagnosis.not_judged]
    return blocks


def _no_findings(diagnosis: Diagnosis) -> str:
    if not diagnosis.steps:
        return "No findings."
    skips = "All skips are normal." if diagnosis.skipped else "No steps skipped."
    return f"Healthy. {skips}"


def _finding(finding: Finding) -> RenderableType:
    title, *lines = finding.text().splitlines()
    style = "cyan" if finding.normal else "bold red" if finding.hopeless else "yellow"
    code, _, what = title.partition(" ")
    head = Text.assemble((code, style), f" {what}")
    if not lines:
        return head
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for line in lines:
        rows.add_row(line[2:8].strip(), Text(line[9:]))
    return Group(head, Padding(rows, (0, 0, 0, 2), expand=False))


def verdict_table(diagnosis: Diagnosis, width: int) -> Table:
    """Return the number of steps by verdict."""
    columns = (
        Column("code", 2, right=False),
        Column("steps"),
        Column("share", 1),
        Column("", 3, right=False),
    )
    ranked = sorted(diagnosis.verdicts.items(), key=lambda item: -item[1])
    rows = [
        (
            Text(verdict_name(verdict), style=VERDICT_STYLES[verdict].style),
            verdict.code,
            thousands(count),
            fixed_percent(count / diagnosis.steps),
            Text("normal" if verdict in NORMAL else "", style="dim"),
        )
        for verdict, count in ranked
    ]
    return fitted_table("verdict", columns, rows, width)


def _summary_table(diagnosis: Diagnosis) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in summary(diagnosis).items():
        rows.add_row(name, Text(value))
    return rows


def summary(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the lines of the summary by name, formatted."""
    meta, first, last = diagnosis.meta, diagnosis.first, diagnosis.last
    shown: dict[str, str] = {}
    if first and last:
        low, high = diagnosis.timeline.range()
        ends = f"{power(first.scale)} -> {power(last.scale)}"
        span = f"between {power(2.0**low)} and {power(2.0**high)}"
        moved = low < high
        shown["scale"] = (
            f"{ends}, {span}" if moved else f"{power(last.scale)} throughout"
        )
        if diagnosis.headroom is not None:
            shown["headroom"] = headroom(diagnosis.headroom)
        if last.loss is not None:
            before = "" if first.loss is None else f"{first.loss:.4g} -> "
            shown["loss"] = f"{before}{last.loss:.4g}"
        if last.norm is not None:
            shown["norm"] = f"{last.norm:.4g}, unscaled, at the last step"
    policy = meta.get("policy")
    if policy:
        shown["policy"] = _policy(policy)
    if meta.get("world_size", 1) > 1:
        shown["ranks"] = f"rank {meta.get('rank', 0)} of {meta['world_size']}"
    shown["run"] = _ran(diagnosis)
    dropped = meta.get("dropped")
    if dropped:
        shown["missing"] = f"{thousands(dropped)} rows: the disk was too slow (GS309)"
    return shown


def _policy(policy: Any) -> str:
    if not isinstance(policy, Mapping):
        return str(policy)
    kinds = [str(policy[name]) for name in ("kind", "name") if name in policy]
    words = [
        f"{name}={power(value) if _is_scale(name, value) else value}"
        for name, value in policy.items()
        if name not in ("kind", "name")
    ]
    return " ".join([*kinds, *words])


def _is_scale(name: str, value: Any) -> bool:
    return name.endswith("_scale") and isinstance(value, (int, float))


def _ran(diagnosis: Diagnosis) -> str:
    meta, end = diagnosis.meta, diagnosis.meta["end"]
    words = {"running": _UNENDED}
    words |= dict.fromkeys(("exit", "closed", "error"), "ended")
    ended = words.get(end["state"], end["state"])
    error = end.get("error")
    parts = [f"{ended} with {error}" if error else ended]
    if diagnosis.seconds >= 0.001:
        parts.append(_duration(diagnosis.seconds))
        rate = diagnosis.steps / diagnosis.seconds
        parts.append(f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
    versions = [f"{k} {v}" for k, v in dict(meta.get("frameworks", {})).items()]
    return ", ".join([*parts, *versions])


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _phase_table(phases: Sequence[Phase], width: int) -> RenderableType:
    columns = Column("steps"), Column("skipped", 2), Column("scale", 1, right=False)
    rows: list[Sequence[str | Text]] = []
    # The first and the last ones, if there are too many.
    half = MAX_ROWS // 2
    cut = len(phases) > MAX_ROWS
    shown = [*phases[:half], *phases[-half:]] if cut else list(phases)
    for row, phase in enumerate(shown):
        if cut and row == half:
            left = len(phases) - MAX_ROWS
            rows.append([Text(f"… {left} more", style="dim")])
        style = "" if phase.name == STEADY else phase_style(phase.name).style
        ends = power(phase.scale_from), power(phase.scale_to)
        name = Text(phase.name.replace("_", " "), style=style)
        steps = f"{thousands(phase.first)} – {thousands(phase.last)}"
        scale = ends[0] if ends[0] == ends[1] else " -> ".join(ends)
        rows.append((name, steps, thousands(phase.skipped), scale))
    return fitted_table("phase", columns, rows, width)


def _culprit_table(culprits: Sequence[Culprit], width: int) -> RenderableType:
    columns = (
        Column("skipped steps"),
        Column("first in", 1),
        Column("NaN", 2),
        Column("from – to", 3),
    )
    rows = [
        (
            each.name,
            thousands(each.steps),
            thousands(each.first_in),
            thousands(each.nan),
            f"{thousands(each.first)} – {thousands(each.last)}",
        )
        for each in culprits[:MAX_ROWS]
    ]
    table = fitted_table("tensor", columns, rows, width)
    more = len(culprits) - MAX_ROWS
    note = [Text(f"and {more} more", style="dim")] if more > 0 else []
    return Group(table, *note)


def _section(title: str, *body: RenderableType) -> list[RenderableType]:
    return [
        "",
        Text(title, style="bold"),
        *(Padding(b, (0, 0, 0, _INDENT), expand=False) for b in body),
    ]
