"""A run on the terminal: one screen from the verdict to the advice."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradscale.core.findings import Finding, Health, power
from gradscale.diagnosis import Diagnosis
from gradscale.diagnosis.culprits import Culprit
from gradscale.diagnosis.timeline import STEADY, Phase
from gradscale.diagnosis.underflow import SHIFTS, Lost, Underflow
from gradscale.report.chart import mark_legend, scale_chart
from gradscale.report.looks import LOOKS, NORMAL, named, shown_step
from gradscale.report.tables import percent

# Rows of a table beyond which only their number is told.
MOST = 10
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
        parts += _part("Not finite", _culprit_table(diagnosis.culprits))
    if diagnosis.underflow:
        parts += _part("Underflow", *underflow_parts(diagnosis.underflow))
    parts += _part("Findings", Group(*findings(diagnosis.findings)))
    return Group(*parts)


def headline(diagnosis: Diagnosis) -> Text:
    """Return the verdict on a run in one line."""
    skipped, steps = diagnosis.skipped, diagnosis.steps
    share = f" ({percent(skipped / steps)})" if steps and skipped else ""
    counts = f"{shown_step(steps)} steps, {shown_step(skipped)} skipped{share}"
    health = str(diagnosis.health)
    return Text.assemble(
        (str(diagnosis.path.name), "bold"),
        "  ",
        (health, HEALTH_STYLE[diagnosis.health]),
        f"  {counts if steps else 'no step yet'}",
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
            percent(count / diagnosis.steps),
            Text("normal" if verdict in NORMAL else "", style="dim"),
        )
    return table


def underflow_parts(underflow: Underflow) -> list[RenderableType]:
    """Return what the scale loses, and what another would, as table and words."""
    scale = power(underflow.scale)
    said = Text(f"At step {shown_step(underflow.step)}, S = {scale}; ", style="dim")
    said.append("lost: share of what is not 0; higher S: about so", style="dim")
    shifts = [f">at {power(underflow.scale * 2.0**shift)}" for shift in SHIFTS]
    table = columns_of("tensor", ">zero", ">subnormal", ">lost now", *shifts)
    for lost in (underflow.whole, *underflow.tensors[:MOST]):
        table.add_row(*_lost_row(lost))
    more = len(underflow.tensors) - MOST
    parts: list[RenderableType] = [said, table]
    if more > 0:
        parts.append(Text(f"and {more} tensors that lose no more", style="dim"))
    return [*parts, *(Text(sentence) for sentence in _reading(underflow))]


def _reading(underflow: Underflow) -> list[str]:
    said = [underflow.advice[0].upper() + underflow.advice[1:] + "."]
    if underflow.flushed is not None:
        told = str(underflow.flushed)
        said.append(told[0].upper() + told[1:] + ".")
    return said


def _lost_row(lost: Lost) -> list[RenderableType]:
    style = "bold" if not lost.tensor else ""
    return [
        Text(lost.tensor or "all together", style=style, overflow="fold"),
        percent(lost.zeros),
        percent(lost.subnormal),
        _share(lost.lost),
        *(_share(lost.at[shift]) for shift in SHIFTS),
    ]


def _share(share: float | None) -> Text:
    if share is None:
        return Text("overflow", style="dim")
    return Text(percent(share), style="yellow" if share >= 0.01 else "")


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
    words = {"running": "still running, or killed", "exit": "ended", "closed": "ended"}
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
        style = "" if phase.name == STEADY else _style(phase.name)
        ends = power(phase.scale_from), power(phase.scale_to)
        table.add_row(
            Text(phase.name.replace("_", " "), style=style),
            f"{shown_step(phase.first)} – {shown_step(phase.last)}",
            shown_step(phase.skipped),
            ends[0] if ends[0] == ends[1] else " -> ".join(ends),
        )
    return table


def _style(name: str) -> str:
    return next(look.style for verdict, look in LOOKS.items() if str(verdict) == name)


def _culprit_table(culprits: Sequence[Culprit]) -> RenderableType:
    table = columns_of("tensor", ">skipped steps", ">first in", ">NaN", "from – to")
    for each in culprits[:MOST]:
        table.add_row(
            Text(each.name, overflow="fold"),
            shown_step(each.steps),
            shown_step(each.first_in),
            shown_step(each.nan),
            f"{shown_step(each.first)} – {shown_step(each.last)}",
        )
    more = len(culprits) - MOST
    note = [Text(f"and {more} more", style="dim")] if more > 0 else []
    return Group(table, *note)


def columns_of(*columns: str) -> Table:
    """Return a table; columns that begin with > are flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left")
    return table


def _part(title: str, *body: RenderableType) -> list[RenderableType]:
    return [
        "",
        Text(title, style="bold"),
        *(Padding(b, (0, 0, 0, 2), expand=False) for b in body),
    ]
