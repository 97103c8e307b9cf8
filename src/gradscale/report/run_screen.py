"""The screen of `gradscale report`: verdict, chart, tables and findings of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradscale.core.formatting import power
from gradscale.core.records import Verdict
from gradscale.diagnosis import Diagnosis
from gradscale.diagnosis.culprits import Culprit
from gradscale.diagnosis.timeline import STEADY, Phase
from gradscale.judge.findings import Finding, Health
from gradscale.report.chart import mark_legend, scale_chart
from gradscale.report.columns import shortened, table_of
from gradscale.report.style import (
    NORMAL,
    VERDICT_STYLES,
    fixed_percent,
    phase_style,
    thousands,
    verdict_name,
)
from gradscale.report.underflow_screen import underflow_parts

# Maximum rows of a table; the rest is summarised as a count.
MAX_ROWS = 10
# Characters of the culprit table: its count columns, and the shortest name column.
_COUNTS_WIDTH, _MIN_NAME = 40, 20
HEALTH_STYLE = {
    Health.HEALTHY: "bold green",
    Health.FINDINGS: "bold yellow",
    Health.COLLAPSE: "bold red",
}


def run_screen(diagnosis: Diagnosis, width: int, *, braille: bool = True) -> Group:
    """Return the whole screen of `gradscale report`."""
    parts: list[RenderableType] = [headline(diagnosis), _summary_table(diagnosis)]
    if diagnosis.steps:
        chart = scale_chart(diagnosis.timeline, width, braille=braille)
        parts += ["", Text("Scale", style="bold"), chart]
        legend = mark_legend(diagnosis.timeline)
        if legend.plain:
            parts.append(Padding(legend, (0, 0, 0, 8), expand=False))
        parts += _section("Verdicts", verdict_table(diagnosis))
        if len(diagnosis.phases) > 1:
            parts += _section("Phases", _phase_table(diagnosis.phases))
    if diagnosis.culprits:
        parts += _section("Not finite", _culprit_table(diagnosis.culprits, width))
    if diagnosis.underflow:
        shown = underflow_parts(diagnosis.underflow, width, diagnosis.findings)
        parts += _section("Underflow", *shown)
    parts += _section("Findings", Group(*findings(diagnosis)))
    return Group(*parts)


def headline(diagnosis: Diagnosis) -> Text:
    """Return the verdict on a run in one line."""
    skipped, steps = diagnosis.skipped, diagnosis.steps
    share = f" ({fixed_percent(skipped / steps)})" if steps and skipped else ""
    counts = f"{thousands(steps)} steps, {thousands(skipped)} skipped{share}"
    if idle := diagnosis.verdicts.get(Verdict.NO_GRADIENTS, 0):
        counts += f", {thousands(idle)} without gradients"
    going = diagnosis.meta.get("end", {}).get("state") == "running"
    nothing = "no steps yet" if going else "no steps recorded"
    health = str(diagnosis.health)
    return Text.assemble(
        (str(diagnosis.path.name), "bold"),
        "  ",
        (health, HEALTH_STYLE[diagnosis.health]),
        f"  {counts if steps else nothing}",
    )


def findings(diagnosis: Diagnosis) -> list[RenderableType]:
    """Return the findings as blocks, the most severe first."""
    if not diagnosis.findings:
        return [Text(_no_findings(diagnosis))]
    blocks: list[RenderableType] = []
    for finding in diagnosis.findings:
        blocks += ["", _finding(finding)] if blocks else [_finding(finding)]
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


def verdict_table(diagnosis: Diagnosis) -> Table:
    """Return the number of steps by verdict."""
    table = table_of("verdict", "code", ">steps", ">share", "")
    ranked = sorted(diagnosis.verdicts.items(), key=lambda item: -item[1])
    for verdict, count in ranked:
        table.add_row(
            Text(verdict_name(verdict), style=VERDICT_STYLES[verdict].style),
            verdict.code,
            thousands(count),
            fixed_percent(count / diagnosis.steps),
            Text("normal" if verdict in NORMAL else "", style="dim"),
        )
    return table


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
            shown["headroom"] = f"{diagnosis.headroom:.1f} bits below 65504"
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
        f"{name}={power(value) if name.endswith('_scale') else value}"
        for name, value in policy.items()
        if name not in ("kind", "name")
    ]
    return " ".join([*kinds, *words])


def _ran(diagnosis: Diagnosis) -> str:
    meta = diagnosis.meta
    state = str(meta.get("end", {}).get("state", "unknown"))
    words = {"running": "still running, or killed"}
    words |= dict.fromkeys(("exit", "closed", "error"), "ended")
    ended = words.get(state, state)
    error = meta.get("end", {}).get("error")
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


def _phase_table(phases: Sequence[Phase]) -> RenderableType:
    table = table_of("phase", ">steps", ">skipped", "scale")
    # The first and the last ones, if there are too many.
    half = MAX_ROWS // 2
    cut = len(phases) > MAX_ROWS
    shown = [*phases[:half], *phases[-half:]] if cut else list(phases)
    for row, phase in enumerate(shown):
        if cut and row == half:
            left = len(phases) - MAX_ROWS
            table.add_row(Text(f"… {left} more", style="dim"), "", "", "")
        style = "" if phase.name == STEADY else phase_style(phase.name).style
        ends = power(phase.scale_from), power(phase.scale_to)
        table.add_row(
            Text(phase.name.replace("_", " "), style=style),
            f"{thousands(phase.first)} – {thousands(phase.last)}",
            thousands(phase.skipped),
            ends[0] if ends[0] == ends[1] else " -> ".join(ends),
        )
    return table


def _culprit_table(culprits: Sequence[Culprit], width: int) -> RenderableType:
    table = table_of("tensor", ">skipped steps", ">first in", ">NaN", ">from – to")
    shown = culprits[:MAX_ROWS]
    spans = [f"{thousands(each.first)} – {thousands(each.last)}" for each in shown]
    name_width = max(_MIN_NAME, width - _COUNTS_WIDTH - max(map(len, spans)))
    for each, span in zip(shown, spans, strict=True):
        table.add_row(
            shortened(each.name, name_width),
            thousands(each.steps),
            thousands(each.first_in),
            thousands(each.nan),
            span,
        )
    more = len(culprits) - MAX_ROWS
    note = [Text(f"and {more} more", style="dim")] if more > 0 else []
    return Group(table, *note)


def _section(title: str, *body: RenderableType) -> list[RenderableType]:
    return [
        "",
        Text(title, style="bold"),
        *(Padding(b, (0, 0, 0, 2), expand=False) for b in body),
    ]
