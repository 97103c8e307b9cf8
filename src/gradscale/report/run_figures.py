"""The figures of one run: scale and loss against steps, gradients by exponent."""

import math
from typing import Any

from gradscale.core.formatting import counted, power
from gradscale.diagnosis import Diagnosis
from gradscale.diagnosis.timeline import STEADY
from gradscale.report.exponents import LINE, exponent_panel
from gradscale.report.figure_theme import MUTED, WIDTH, alt, caption, figure
from gradscale.report.style import (
    BY_SEVERITY,
    VERDICT_STYLES,
    phase_style,
    thousands,
    verdict_name,
)

# Pieces into which a long timeline is divided: one per pixel of the width.
PIECES = 780
# Bits; a bound further from the scale is not drawn, as it would flatten the curve.
_NEAR = 8
# Losses beyond float32 are not drawn; a ratio of this much needs a logarithmic axis.
_LARGEST = 2.0**128
_WIDE = 100.0
# Characters that fit on the title line.
_TITLE = 84


def run_figure(diagnosis: Diagnosis) -> alt.VConcatChart:
    """Draw scale and verdicts, the loss, and the exponents of the gradients."""
    panels = [_scale_panel(diagnosis)] if diagnosis.steps else []
    if losses := _losses(diagnosis):
        panels.append(_loss_panel(diagnosis, losses))
    if diagnosis.underflow is not None:
        panels.append(exponent_panel(diagnosis.underflow))
    if not panels:
        panels.append(_empty_panel("The run has no steps yet"))
    chart = figure(
        *panels,
        title=_title(diagnosis),
        subtitle=_subtitle(diagnosis),
        spacing=30,
        symbolSize=90,
        columnPadding=18,
        offset=8,
    )
    return chart.resolve_scale(color="independent", shape="independent")


def _title(diagnosis: Diagnosis) -> str:
    serious = diagnosis.serious
    if not serious:
        skips = "all skips are normal" if diagnosis.skipped else "no steps skipped"
        return f"Healthy: {skips}" if diagnosis.steps else "No steps"
    text = f"{serious[0].code} {serious[0].what}"
    if len(text) > _TITLE:
        # The part after the semicolon counts repetitions.
        text = text.partition("; ")[0]
    return text if len(text) <= _TITLE else text[: _TITLE - 1].rstrip() + "…"


def _subtitle(diagnosis: Diagnosis) -> str:
    steps, skipped = counted(diagnosis.steps, "step"), thousands(diagnosis.skipped)
    counts = f"{diagnosis.path.name}: {steps}, {skipped} skipped"
    if diagnosis.bounds is None:
        return counts
    floor, ceiling = map(power, diagnosis.bounds)
    return f"{counts}; the policy keeps the scale between {floor} and {ceiling}"


def _scale_panel(diagnosis: Diagnosis) -> alt.LayerChart | alt.FacetChart:
    timeline = diagnosis.timeline
    low, high = timeline.range()
    rules = _rules(diagnosis, low, high)
    values = [low, high, *(rule["log2"] for rule in rules)]
    # A constant scale is drawn mid-panel, not at an edge.
    margin = 1 if max(values) - min(values) > 4 else 3
    bottom, top = math.floor(min(values)) - margin, math.ceil(max(values)) + margin
    x = _steps(diagnosis)
    y = alt.Y(
        "log2:Q",
        title="scale",
        scale=alt.Scale(domain=[bottom, top], nice=False),
        axis=alt.Axis(values=_ticks(bottom, top), labelExpr="'2^' + datum.value"),
    )
    shades = (
        alt.Chart(alt.Data(values=_shades(diagnosis)))
        # The last step ends one unit to the right of the axis.
        .mark_rect(clip=True)
        .encode(
            x=alt.X("first:Q", scale=_step_scale(diagnosis)),
            x2="last:Q",
            color=alt.Color("colour:N", scale=None),
        )
    )
    line = (
        alt.Chart(alt.Data(values=_line(diagnosis)))
        .mark_line(interpolate="step-after", color=LINE, strokeWidth=1.8)
        .encode(x=x, y=y)
    )
    rule = (
        alt.Chart(alt.Data(values=rules))
        .mark_rule(color=MUTED, strokeDash=[4, 3])
        .encode(y=y)
    )
    note = (
        alt.Chart(alt.Data(values=rules))
        .mark_text(align="left", dx=4, dy=-7, fontSize=12, color=MUTED)
        .encode(x=alt.value(0), y=y, text="text:N")
    )
    marks = _marks(diagnosis)
    layers = [shades, rule, note, line]
    text = "Loss scale"
    if marks:
        layers.append(_points(marks, x, y))
        text += "; marks are steps with a verdict other than ok"
    return alt.layer(*layers).properties(width=WIDTH, height=240, title=caption(text))


def _step_scale(diagnosis: Diagnosis) -> alt.Scale:
    timeline = diagnosis.timeline
    return alt.Scale(domain=[timeline.first, max(timeline.last, 2)], nice=False)


def _steps(diagnosis: Diagnosis) -> alt.X:
    """Return the axis of steps, the same in all panels."""
    return alt.X(
        "step:Q",
        title="step",
        scale=_step_scale(diagnosis),
        axis=alt.Axis(grid=False, tickCount=8, tickMinStep=1, format=",d"),
    )


def _losses(diagnosis: Diagnosis) -> list[dict[str, float]]:
    """Return the points of the loss curve that a figure can show."""
    pieces = (piece._asdict() for piece in diagnosis.losses.pieces())
    return [each for each in pieces if max(map(abs, each.values())) < _LARGEST]


def _loss_panel(
    diagnosis: Diagnosis, losses: list[dict[str, float]]
) -> alt.LayerChart | alt.FacetChart:
    low = min(each["low"] for each in losses)
    high = max(each["high"] for each in losses)
    # On a linear axis a loss that falls or diverges by more looks like a right angle.
    log = 0.0 < _WIDE * low < high
    x = _steps(diagnosis)
    heights = alt.Scale(type="log" if log else "linear", zero=False)
    y = alt.Y(
        "mean:Q",
        title="loss",
        scale=heights,
        axis=alt.Axis(tickCount=5),
    )
    data, width = alt.Data(values=losses), diagnosis.losses.width
    band = (
        alt.Chart(data)
        .mark_area(color=LINE, opacity=0.2)
        .encode(x=x, y=alt.Y("low:Q", scale=heights), y2="high:Q")
    )
    points = alt.Chart(data).encode(x=x, y=y)
    # A single finite loss is not a line.
    line = (
        points.mark_line(color=LINE, strokeWidth=1.2)
        if len(losses) > 1
        else points.mark_point(color=LINE, filled=True)
    )
    text = "Loss before scaling; values that are not finite are left out"
    if width > 1:
        text = f"{text}; mean and range of {thousands(width)} steps"
    return alt.layer(band, line).properties(
        width=WIDTH, height=140, title=caption(text)
    )


def _ticks(bottom: int, top: int) -> list[int]:
    """Return up to eight whole exponents, evenly spaced."""
    apart = next(n for n in (1, 2, 4, 5, 8, 10, 20, 50, 100) if (top - bottom) / n <= 8)
    return list(range(apart * math.ceil(bottom / apart), top + 1, apart))


def _points(marks: list[dict[str, Any]], x: alt.X, y: alt.Y) -> alt.Chart:
    seen = {mark["verdict"] for mark in marks}
    shown = [verdict for verdict in BY_SEVERITY if verdict_name(verdict) in seen]
    names = [verdict_name(verdict) for verdict in shown]
    colours = [VERDICT_STYLES[verdict].colour for verdict in shown]
    shapes = [VERDICT_STYLES[verdict].shape for verdict in shown]
    return (
        alt.Chart(alt.Data(values=marks))
        .mark_point(size=55, filled=True, opacity=0.9)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "verdict:N",
                scale=alt.Scale(domain=names, range=colours),
            ),
            shape=alt.Shape(
                "verdict:N",
                scale=alt.Scale(domain=names, range=shapes),
            ),
        )
    )


def _rules(diagnosis: Diagnosis, low: float, high: float) -> list[dict[str, Any]]:
    if diagnosis.bounds is None:
        return []
    floor, ceiling = diagnosis.bounds
    rules = []
    if floor > 0.0 and math.log2(floor) >= low - _NEAR:
        rules.append({"log2": math.log2(floor), "text": f"floor {power(floor)}"})
    if math.log2(ceiling) <= high + _NEAR:
        rules.append({"log2": math.log2(ceiling), "text": f"ceiling {power(ceiling)}"})
    return rules


def _shades(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    return [
        {
            "first": phase.first,
            "last": phase.last + 1,
            "colour": _pale(phase_style(phase.name).colour),
        }
        for phase in diagnosis.phases
        if phase.name != STEADY
    ]


def _pale(colour: str) -> str:
    """Return a colour mixed with eight parts of white.

    Opaque, because altair copies opacity to the legend.

    >>> _pale("#000000"), _pale("#FFFFFF")
    ('#E2E2E2', '#FFFFFF')
    """
    parts = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{(part + 8 * 255) // 9:02X}" for part in parts)


def _line(diagnosis: Diagnosis) -> list[dict[str, float]]:
    """Return the scale at each change; of a long run, the range of each piece."""
    timeline = diagnosis.timeline
    points = [{"step": step, "log2": log2} for step, log2 in timeline.changes()]
    if len(points) > 4 * PIECES:
        span = timeline.last - timeline.first + 1
        points = [
            {"step": timeline.first + span * piece // PIECES, "log2": value}
            for piece, ends in enumerate(timeline.columns(PIECES))
            for value in ends
        ]
    return [*points, {"step": timeline.last, "log2": timeline.at(timeline.last)}]


def _marks(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return the marks: at most one per verdict and piece of the timeline."""
    timeline = diagnosis.timeline
    span = timeline.last - timeline.first + 1
    kept: dict[Any, dict[str, Any]] = {}
    for mark in timeline.marks():
        piece = (mark.step - timeline.first) * PIECES // span
        row = {
            "step": mark.step,
            "log2": mark.log2,
            "verdict": verdict_name(mark.verdict),
        }
        kept.setdefault((piece, mark.verdict), row)
    return list(kept.values())


def _empty_panel(text: str) -> alt.LayerChart | alt.FacetChart:
    blank = alt.Chart(alt.Data(values=[{}])).mark_point(opacity=0)
    return alt.layer(blank).properties(width=WIDTH, height=20, title=caption(text))
