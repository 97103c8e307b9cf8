"""A run on the terminal: one screen from the verdict to the advice."""

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
from gradscale.report.columns import columns_of, shortened
from gradscale.report.style import (
    LOOKS,
    NORMAL,
    fixed_percent,
    named,
    phase_look,
    shown_step,
)
from gradscale.report.underflow_screen import underflow_parts

# Rows of a table beyond which only their number is told.
MOST = 10
# What the columns of counts take in a table of culprits.
_BESIDE_NAME, _LEAST_NAME = 40, 20
HEALTH_STYLE = {
    Health.HEALTHY: "bold green",
    Health.FINDINGS: "bold yellow",
    Health.COLLAPSE: "bold red",
}


def run_screen(diagnosis: Diagnosis, width: int, *, braille: bool = True) -> Group:
    """Return the whole screen of `gradscale report`."""
    parts: list[RenderableType] = [headline(diagnosis), _facts(diagnosis)]
    if diagnosis.steps:
        chart = scale_chart(diagnosis.timeline, width, braille=braille)
        parts += ["", Text("Scale", style="bold"), chart]
        legend = mark_legend(diagnosis.timeline)
        if legend.plain:
            parts.append(Padding(legend, (0, 0, 0, 8), expand=False))
        parts += _part("Verdicts", verdict_table(diagnosis))
        if len(diagnosis.phases) > 1:
            parts += _part("Phases", _phase_table(diagnosis.phases))
    if diagnosis.culprits:
        parts += _part("Not finite", _culprit_table(diagnosis.culprits, width))
    if diagnosis.underflow:
        shown = underflow_parts(diagnosis.underflow, width, diagnosis.findings)
        parts += _part("Underflow", *shown)
    parts += _part("Findings", Group(*findings(diagnosis.findings)))
    return Group(*parts)


def headline(diagnosis: Diagnosis) -> Text:
    """Return the verdict on a run in one line."""
    skipped, steps = diagnosis.skipped, diagnosis.steps
    share = f" ({fixed_percent(skipped / steps)})" if steps and skipped else ""
    counts = f"{shown_step(steps)} steps, {shown_step(skipped)} skipped{share}"
    if idle := diagnosis.verdicts.get(Verdict.NO_GRADIENTS, 0):
        counts += f", {shown_step(idle)} without gradients"
    going = diagnosis.meta.get("end", {}).get("state") == "running"
    nothing = "no step yet" if going else "no step was recorded"
    health = str(diagnosis.health)
    return Text.assemble(
        (str(diagnosis.path.name), "bold"),
        "  ",
        (health, HEALTH_STYLE[diagnosis.health]),
        f"  {counts if steps else nothing}",
    )


def findings(found: Sequence[Finding]) -> list[RenderableType]:
    """Return findings as blocks, the most severe first."""
    if not found:
        return [Text("Nothing is wrong: what was skipped, if anything, is normal.")]
    blocks: list[RenderableType] = []
    for finding in found:
        blocks += ["", _finding(finding)] if blocks else [_finding(finding)]
    return blocks


def _finding(finding: Finding) -> RenderableType:
    title, *lines = finding.text().splitlines()
    style = "cyan" if finding.normal else "bold red" if finding.hopeless else "yellow"
    code, _, said = title.partition(" ")
    head = Text.assemble((code, style), f" {said}")
    if not lines:
        return head
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for line in lines:
        rows.add_row(line[2:8].strip(), Text(line[9:]))
    return Group(head, Padding(rows, (0, 0, 0, 2), expand=False))


def verdict_table(diagnosis: Diagnosis) -> Table:
    """Return how often each verdict was given."""
    table = columns_of("verdict", "code", ">steps", ">share", "")
    ranked = sorted(diagnosis.verdicts.items(), key=lambda item: -item[1])
    for verdict, count in ranked:
        table.add_row(
            Text(named(verdict), style=LOOKS[verdict].style),
            verdict.code,
            shown_step(count),
            fixed_percent(count / diagnosis.steps),
            Text("normal" if verdict in NORMAL else "", style="dim"),
        )
    return table


def _facts(diagnosis: Diagnosis) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in facts(diagnosis).items():
        rows.add_row(name, Text(value))
    return rows


def facts(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the facts of the summary by name, as they are shown."""
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
            begun = "" if first.loss is None else f"{first.loss:.4g} -> "
            shown["loss"] = f"{begun}{last.loss:.4g}"
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
        shown["missing"] = (
            f"{shown_step(dropped)} rows: the disk did not keep up (GS309)"
        )
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
    table = columns_of("phase", ">steps", ">skipped", "scale")
    # The beginning and the end, if there are too many.
    half = MOST // 2
    crowd = len(phases) > MOST
    shown = [*phases[:half], *phases[-half:]] if crowd else list(phases)
    for place, phase in enumerate(shown):
        if crowd and place == half:
            left = len(phases) - MOST
            table.add_row(Text(f"… {left} more", style="dim"), "", "", "")
        style = "" if phase.name == STEADY else phase_look(phase.name).style
        ends = power(phase.scale_from), power(phase.scale_to)
        table.add_row(
            Text(phase.name.replace("_", " "), style=style),
            f"{shown_step(phase.first)} – {shown_step(phase.last)}",
            shown_step(phase.skipped),
            ends[0] if ends[0] == ends[1] else " -> ".join(ends),
        )
    return table


def _culprit_table(culprits: Sequence[Culprit], width: int) -> RenderableType:
    table = columns_of("tensor", ">skipped steps", ">first in", ">NaN", ">from – to")
    spans = [
        f"{shown_step(each.first)} – {shown_step(each.last)}"
        for each in culprits[:MOST]
    ]
    room = max(_LEAST_NAME, width - _BESIDE_NAME - max(map(len, spans)))
    for each, span in zip(culprits[:MOST], spans, strict=False):
        table.add_row(
            shortened(each.name, room),
            shown_step(each.steps),
            shown_step(each.first_in),
            shown_step(each.nan),
            span,
        )
    more = len(culprits) - MOST
    note = [Text(f"and {more} more", style="dim")] if more > 0 else []
    return Group(table, *note)


def _part(title: str, *body: RenderableType) -> list[RenderableType]:
    return [
        "",
        Text(title, style="bold"),
        *(Padding(b, (0, 0, 0, 2), expand=False) for b in body),
    ]
