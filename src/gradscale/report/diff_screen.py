"""The screen of `gradscale diff`: two runs side by side."""

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradscale.core.formatting import counted, percent, power
from gradscale.diagnosis import Comparison, Diagnosis
from gradscale.diagnosis.comparison import Parting
from gradscale.judge.verdict_table import BY_CODE
from gradscale.report.columns import table_of
from gradscale.report.run_screen import HEALTH_STYLE
from gradscale.report.style import (
    VERDICT_STYLES,
    fixed_percent,
    headroom,
    thousands,
    verdict_name,
)

_NOTHING = "–"


def diff_screen(comparison: Comparison) -> Group:
    """Return the whole screen of `gradscale diff`."""
    parts: list[RenderableType] = [_headline(comparison), "", _side_by_side(comparison)]
    if comparison.partings:
        parts += ["", Text("First differences", style="bold")]
        parts.append(Padding(_partings(comparison), (0, 0, 0, 2), expand=False))
    parts += ["", Text("Settings that differ", style="bold")]
    parts.append(Padding(_settings(comparison), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def _headline(comparison: Comparison) -> Text:
    if comparison.same:
        return Text("The runs are the same, step for step.", style="bold green")
    if not comparison.shared:
        return Text("The runs have no step in common.", style="bold")
    if not comparison.partings:
        steps = counted(comparison.shared, "common step")
        text = f"The runs are the same in all {steps}."
        return Text(text, style="bold")
    first = comparison.partings[0]
    return Text.assemble(
        ("The runs diverge at step ", "bold"),
        (thousands(first.step), "bold yellow"),
        (f": {_difference(first)}", "bold"),
    )


def _difference(parting: Parting) -> str:
    if parting.column == "applied":
        took_a = "a took the step, b skipped it"
        return took_a if parting.a else "a skipped the step, b took it"
    a, b = (
        "missing" if value is None else _value(parting, value)
        for value in (parting.a, parting.b)
    )
    return f"{parting.column} is {a} in a, {b} in b"


def _value(parting: Parting, value: Any) -> str:
    if parting.column == "scale":
        return power(value)
    if parting.column == "applied":
        return "taken" if value else "skipped"
    if parting.column == "verdict":
        # A newer version may have further codes.
        row = BY_CODE.get(value)
        return verdict_name(row.verdict) if row and row.verdict else str(value)
    return _NOTHING if value is None else f"{value:.9g}"


def _side_by_side(comparison: Comparison) -> Table:
    a, b = comparison.a, comparison.b
    table = table_of("", f">{a.path.name}", f">{b.path.name}")
    if a.path.name == b.path.name:
        table = table_of("", f">{a.path}", f">{b.path}")
    table.add_row("verdict", *(_health(run) for run in (a, b)))
    one, two = _figures(a), _figures(b)
    for name in {**one, **two}:
        left, right = one.get(name, _NOTHING), two.get(name, _NOTHING)
        style = "" if left == right else "yellow"
        table.add_row(name, Text(left, style=style), Text(right, style=style))
    for verdict in VERDICT_STYLES:
        counts = [run.verdicts.get(verdict, 0) for run in (a, b)]
        if any(counts):
            style = "" if counts[0] == counts[1] else "yellow"
            cells = (Text(thousands(count), style=style) for count in counts)
            table.add_row(verdict_name(verdict), *cells)
    return table


def _health(run: Diagnosis) -> Text:
    return Text(str(run.health), style=HEALTH_STYLE[run.health])


def _figures(run: Diagnosis) -> dict[str, str]:
    shown = {
        "steps": thousands(run.steps),
        "skipped": thousands(run.skipped),
        "skip rate": fixed_percent(run.skipped / run.steps) if run.steps else _NOTHING,
    }
    if run.first and run.last:
        low, high = run.timeline.range()
        shown |= {
            "scale, first": power(run.first.scale),
            "scale, last": power(run.last.scale),
            "scale, lowest": power(2.0**low),
            "scale, highest": power(2.0**high),
        }
        if run.last.loss is not None:
            shown["loss, last"] = f"{run.last.loss:.5g}"
        if run.last.norm is not None:
            shown["norm, last"] = f"{run.last.norm:.5g}"
    if run.headroom is not None:
        shown["headroom"] = headroom(run.headroom)
    if run.underflow is not None:
        whole = run.underflow.whole
        estimate = f"~{percent(whole.lost)}"
        shown["lost to underflow"] = (
            estimate if whole.flushed else fixed_percent(whole.lost)
        )
    codes = ", ".join(dict.fromkeys(finding.code for finding in run.serious))
    shown["findings"] = codes or "none"
    return shown


def _partings(comparison: Comparison) -> Table:
    table = table_of("column", ">step", ">a", ">b")
    for parting in comparison.partings:
        values = _value(parting, parting.a), _value(parting, parting.b)
        table.add_row(parting.column, thousands(parting.step), *values)
    return table


def _settings(comparison: Comparison) -> RenderableType:
    if not comparison.settings:
        return Text("none", style="dim")
    table = table_of("setting", "a", "b")
    for setting in comparison.settings:
        values = (_setting(setting.name, value) for value in (setting.a, setting.b))
        table.add_row(setting.name, *(Text(value, overflow="fold") for value in values))
    return table


def _setting(name: str, value: Any) -> str:
    if name.endswith("scale") and isinstance(value, float) and value > 0.0:
        return power(value)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
