"""The figure of `gradscale demo`: losses and scales of all precisions."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gradscale.report.figure_theme import INK, MUTED, WIDTH, alt, caption, figure


class Curves(Protocol):
    """The curves of one run.

    Attributes:
        name: Legend entry.
        losses: (steps done, loss) pairs.
        scales: Scale of each step; empty without loss scaling.
        skipped: Indices of the skipped steps.
    """

    @property
    def name(self) -> str: ...
    @property
    def losses(self) -> Sequence[tuple[int, float]]: ...
    @property
    def scales(self) -> Sequence[float]: ...
    @property
    def skipped(self) -> Sequence[int]: ...


# (colour, width, dashes); colours of Okabe and Ito, safe for colour-blind readers.
# The first run is the reference: wide and pale, so that the others are visible on it.
_LINE_STYLES: tuple[tuple[Any, ...], ...] = (
    ("#B4B4B4", 8.0, [1, 0]),
    ("#009E73", 2.2, [2, 3]),
    ("#D55E00", 3.0, [1, 0]),
    ("#E69F00", 2.6, [8, 5]),
    ("#0072B2", 1.8, [1, 0]),
)


def comparison_figure(
    runs: Sequence[Curves],
    other_seeds: Iterable[Curves],
    *,
    baseline: float,
    title: str,
    subtitle: str,
) -> alt.VConcatChart:
    """Draw the loss and the scale of runs against steps.

    Args:
        runs: The reference first; at most five.
        other_seeds: The reference with other seeds, drawn as a band around it.
        baseline: Loss of guessing by character frequency, drawn as a horizontal rule.
        title: The finding that the figure shows.
        subtitle: The setup.
    """
    steps = runs[0].losses[-1][0]
    losses = _loss_panel(runs, [runs[0], *other_seeds], baseline, steps)
    scales = _scale_panel(runs, steps)
    return figure(
        losses,
        scales,
        title=title,
        subtitle=subtitle,
        spacing=20,
        symbolType="stroke",
        symbolSize=700,
        columnPadding=22,
        offset=10,
    )


def _loss_panel(
    runs: Sequence[Curves], seeds: Sequence[Curves], baseline: float, steps: int
) -> alt.LayerChart | alt.FacetChart:
    rows: list[dict[str, Any]] = [
        {"run": run.name, "step": step, "loss": loss}
        for run in runs
        for step, loss in run.losses
        if math.isfinite(loss)
    ]
    band = [
        {"step": at[0][0], "low": min(y for _, y in at), "high": max(y for _, y in at)}
        for at in zip(*(run.losses for run in seeds), strict=True)
    ]
    # The axis covers the second half: the initial drop would flatten the rest.
    late = [row["loss"] for row in rows if row["step"] >= steps / 2]
    low, high = min(*late, baseline), max(*late, baseline)
    span = max(high - low, 0.01)
    domain = alt.Scale(domain=[low - 0.1 * span, high + 0.5 * span], nice=False)
    loss = alt.Y(
        "loss:Q",
        title="nats per character",
        scale=domain,
        axis=alt.Axis(tickCount=6),
    )
    text = (
        f"Loss on held-out text, {rows[0]['loss']:.1f} at step 0; the grey band is "
        f"{runs[0].name} over {len(seeds)} seeds"
    )
    x = _steps(steps, title=None)
    area = (
        alt.Chart(alt.Data(values=band))
        .mark_area(clip=True, color=_LINE_STYLES[0][0], opacity=0.3)
        .encode(x=x, y=alt.Y("low:Q", scale=domain), y2="high:Q")
    )
    rule = (
        alt.Chart(alt.Data(values=[{"loss": baseline}]))
        .mark_rule(color=MUTED, strokeDash=[2, 3])
        .encode(y=loss)
    )
    note = (
        alt.Chart(alt.Data(values=[{"step": steps, "loss": baseline}]))
        .mark_text(align="right", dy=-11, fontSize=12, color=MUTED)
        .encode(x=x, y=loss, text=alt.value("guessing by character frequency alone"))
    )
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(clip=True, strokeJoin="round")
        .encode(x=x, y=loss, **_line_channels(runs))
    )
    return alt.layer(area, rule, lines, note).properties(
        width=WIDTH, height=280, title=caption(text)
    )


def _scale_panel(runs: Sequence[Curves], steps: int) -> alt.LayerChart | alt.FacetChart:
    rows: list[dict[str, Any]] = [
        {"run": run.name, "step": step, "log2": math.log2(scale)}
        for run in runs
        for step, scale in enumerate(run.scales)
    ]
    skips = [row for run in runs for row in _skips(run)]
    exponents = [row["log2"] for row in rows]
    x = _steps(steps, title="step")
    scale = alt.Y(
        "log2:Q",
        title="scale",
        scale=alt.Scale(domain=[min(exponents) - 1, max(exponents) + 1], nice=False),
        axis=alt.Axis(tickMinStep=1, tickCount=5, labelExpr="'2^' + datum.label"),
    )
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(interpolate="step-after")
        .encode(x=x, y=scale, **_line_channels(runs))
    )
    marks = (
        alt.Chart(alt.Data(values=skips))
        .mark_text(text="×", fontSize=22, fontWeight="bold", color=INK)
        .encode(x=x, y=scale)
    )
    return alt.layer(lines, marks).properties(
        width=WIDTH,
        height=120,
        title=caption("Loss scale; × marks a skipped step"),
    )


def _skips(run: Curves) -> list[dict[str, float]]:
    return [
        {"step": step, "log2": math.log2(run.scales[step])}
        for step in run.skipped
        if run.scales
    ]


def _steps(steps: int, title: str | None) -> alt.X:
    return alt.X(
        "step:Q",
        title=title,
        scale=alt.Scale(domain=[0, steps], nice=False),
        axis=alt.Axis(grid=False, tickCount=8, tickMinStep=1),
    )


def _line_channels(runs: Sequence[Curves]) -> dict[str, Any]:
    """Return the encoding channels that differ by run: colour, width and dashes."""
    channels = (alt.Color, alt.StrokeWidth, alt.StrokeDash)
    names = [run.name for run in runs]
    return {
        channel.__name__[0].lower() + channel.__name__[1:]: channel(
            "run:N", scale=alt.Scale(domain=names, range=list(values[: len(names)]))
        )
        for channel, values in zip(
            channels, zip(*_LINE_STYLES, strict=True), strict=True
        )
    }
