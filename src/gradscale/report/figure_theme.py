"""Altair with its install hint, and the configuration that all figures share."""

from pathlib import Path
from typing import Any

from gradscale.core.formatting import printable

try:
    import altair as alt
    import vl_convert  # noqa: F401  # altair renders PNG with it, offline
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed. The figures are drawn with altair and "
        "vl-convert-python. Run: pip install 'gradscale[report]'",
        name=error.name,
    ) from error

WIDTH = 780
INK, MUTED, GRID = "#1F2328", "#59636E", "#E8EAED"


def figure(
    *panels: Any, title: str, subtitle: str, spacing: int, **legend: Any
) -> alt.VConcatChart:
    """Stack panels below a title.

    Args:
        panels: Charts, from top to bottom.
        title: The finding that the figure shows.
        subtitle: The run or the setup.
        spacing: Pixels between two panels.
        legend: Options of the legend, beside those that all figures share.
    """
    # The texts may come from a file of any origin.
    heading = alt.TitleParams(
        printable(title),
        subtitle=printable(subtitle),
        fontSize=18,
        subtitleFontSize=13,
        offset=14,
    )
    return (
        alt.vconcat(*panels, spacing=spacing, background="white", padding=16)
        .properties(title=heading)
        .configure(font="Helvetica, Arial, Liberation Sans, sans-serif")
        .configure_view(stroke=None)
        .configure_title(
            anchor="start", color=INK, subtitleColor=MUTED, subtitlePadding=5
        )
        .configure_axis(
            labelFontSize=12,
            labelColor=MUTED,
            titleFontSize=12,
            titleFontWeight="normal",
            titleColor=MUTED,
            gridColor=GRID,
            domainColor=MUTED,
            tickColor=MUTED,
        )
        .configure_legend(
            title=None, orient="top", labelFontSize=13, labelColor=INK, **legend
        )
    )


def caption(text: str) -> alt.TitleParams:
    """Return the title of one panel."""
    return alt.TitleParams(text, fontSize=13, fontWeight="normal", frame="group")


def save_png(chart: alt.VConcatChart, path: Path) -> None:
    """Write a chart at two pixels per unit, without a browser."""
    chart.save(path, format="png", scale_factor=2)
