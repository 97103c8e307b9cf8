"""The figures, as charts that can be saved as PNG or shown in a page."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

try:
    import altair as alt
    import vl_convert  # noqa: F401  # altair renders PNG with it, offline
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed. The figures are drawn with altair and "
        "vl-convert-python. Run: pip install 'gradscale[report]'",
        name=error.name,
    ) from error


class Curves(Protocol):
    """What one run gives to draw.

    Attributes:
        name: As in the legend.
        losses: (steps done, loss).
        scales: The scale of each step; empty where nothing scales.
        skipped: The steps that were skipped.
    """

    @property
    def name(self) -> str: ...
    @property
    def losses(self) -> Sequence[tuple[int, float]]: ...
    @property
    def scales(self) -> Sequence[float]: ...
    @property
    def skipped(self) -> Sequence[int]: ...


# Okabe and Ito's colours, told apart in every kind of colour vision. The first run is
# the reference: wide and pale, so that the others show on top of it.
_LOOKS = (
    ("#B8B8B8", 7.0, [1, 0]),
    ("#009E73", 2.0, [2, 2]),
    ("#D55E00", 2.6, [1, 0]),
    ("#E69F00", 2.2, [7, 4]),
    ("#0072B2", 2.0, [1, 0]),
)
_INK, _QUIET, _RULE = "#1F2328", "#59636E", "#E4E7EB"
_WIDTH = 760


def comparison_figure(
    runs: Sequence[Curves],
    other_seeds: Iterable[Curves],
    *,
    title: str,
    subtitle: str,
) -> alt.VConcatChart:
    """Draw the loss and the scale of runs against steps.

    Args:
        runs: The reference first; at most five.
        other_seeds: The reference with other seeds: drawn as a band around it.
        title: What the figure shows, as a finding.
        subtitle: What was run.
    """
    losses = _loss_panel(runs, [runs[0], *other_seeds])
    scales = _scale_panel(runs)
    return (
        alt.vconcat(losses, scales, spacing=22)
        .resolve_scale(color="shared", strokeDash="shared")
        .properties(
            title=alt.TitleParams(
                title,
                subtitle=subtitle,
                anchor="start",
                fontSize=18,
                subtitleFontSize=13,
                color=_INK,
                subtitleColor=_QUIET,
                subtitlePadding=5,
                offset=16,
            ),
            padding=18,
            background="white",
        )
        .configure(font="Helvetica, Arial, Liberation Sans, sans-serif")
        .configure_view(stroke=None)
        .configure_axis(
            labelFontSize=12,
            titleFontSize=13,
            titleFontWeight="normal",
            titleColor=_INK,
            labelColor=_QUIET,
            gridColor=_RULE,
            domainColor=_QUIET,
            tickColor=_QUIET,
        )
        .configure_legend(labelFontSize=13, labelColor=_INK, title=None)
    )


def save_png(chart: alt.VConcatChart, path: Path) -> None:
    """Write a chart at twice its size in pixels, without a browser."""
    chart.save(path, format="png", scale_factor=2)


def _loss_panel(runs: Sequence[Curves], seeds: Sequence[Curves]) -> Any:
    rows = [
        {"run": run.name, "step": step, "loss": loss}
        for run in runs
        for step, loss in run.losses
        if math.isfinite(loss)
    ]
    band = [
        {"step": at[0][0], "low": min(y for _, y in at), "high": max(y for _, y in at)}
        for at in zip(*(run.losses for run in seeds), strict=True)
    ]
    steps = alt.X("step:Q", title=None, axis=alt.Axis(grid=False))
    area = (
        alt.Chart(alt.Data(values=band))
        .mark_area(color=_LOOKS[0][0], opacity=0.35)
        .encode(x=steps, y=alt.Y("low:Q"), y2="high:Q")
    )
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeCap="round", strokeJoin="round")
        .encode(
            x=steps,
            y=alt.Y(
                "loss:Q",
                title="Held-out loss (nats per character)",
                scale=alt.Scale(zero=False),
                axis=alt.Axis(tickCount=6),
            ),
            color=_colours(runs),
            strokeDash=_dashes(runs),
            strokeWidth=_widths(runs),
        )
    )
    return alt.layer(area, lines).properties(width=_WIDTH, height=300)


def _scale_panel(runs: Sequence[Curves]) -> Any:
    rows = [
        {"run": run.name, "step": step, "log2": math.log2(scale)}
        for run in runs
        for step, scale in enumerate(run.scales)
    ]
    skips = [
        {"run": run.name, "step": step, "log2": math.log2(run.scales[step])}
        for run in runs
        for step in run.skipped
    ]
    steps = alt.X("step:Q", title="Step", axis=alt.Axis(grid=False))
    scale = alt.Y(
        "log2:Q",
        title="Scale (log₂)",
        scale=alt.Scale(zero=False, padding=8),
        axis=alt.Axis(tickMinStep=1, tickCount=5),
    )
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(interpolate="step-after")
        .encode(
            x=steps,
            y=scale,
            color=_colours(runs),
            strokeDash=_dashes(runs),
            strokeWidth=_widths(runs),
        )
    )
    marks = (
        alt.Chart(alt.Data(values=skips))
        .mark_point(shape="cross", angle=45, filled=True, size=90, opacity=1)
        .encode(x=steps, y=scale, color=alt.value(_INK))
    )
    return alt.layer(lines, marks).properties(width=_WIDTH, height=130)


def _colours(runs: Sequence[Curves]) -> alt.Color:
    return alt.Color("run:N", scale=_by_name(runs, 0), legend=_legend(runs))


def _widths(runs: Sequence[Curves]) -> alt.StrokeWidth:
    return alt.StrokeWidth("run:N", scale=_by_name(runs, 1), legend=_legend(runs))


def _dashes(runs: Sequence[Curves]) -> alt.StrokeDash:
    return alt.StrokeDash("run:N", scale=_by_name(runs, 2), legend=_legend(runs))


def _by_name(runs: Sequence[Curves], look: int) -> alt.Scale:
    names = [run.name for run in runs]
    return alt.Scale(domain=names, range=[_LOOKS[k][look] for k in range(len(runs))])


def _legend(runs: Sequence[Curves]) -> alt.Legend:
    return alt.Legend(
        orient="top", direction="horizontal", symbolType="stroke", symbolSize=500
    )
