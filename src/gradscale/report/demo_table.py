"""The table of `gradscale demo`."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from gradscale.core.formatting import power
from gradscale.report.style import fixed_percent


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One precision in the comparison.

    Attributes:
        name: Of the precision.
        final_loss: Loss after the last step.
        distance: Final loss minus that of the reference; None for the reference.
        lost_share: Share of gradient elements flushed to zero, in [0, 1].
        skipped: Number of skipped steps.
        scale: Scale of the last step; None without loss scaling.
    """

    name: str
    final_loss: float
    distance: float | None
    lost_share: float
    skipped: int
    scale: float | None


def comparison_table(rows: Iterable[ComparisonRow], *, noise: float) -> Table:
    """Return the table of a comparison.

    Args:
        rows: All precisions, the reference included.
        noise: Difference caused by the seed alone; larger distances are highlighted.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("precision")
    for title in ("final loss", "vs FP32", "gradients lost", "skipped", "scale"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.final_loss:.4f}",
            _distance(row.distance, noise),
            fixed_percent(row.lost_share),
            str(row.skipped),
            "–" if row.scale is None else power(row.scale),
        )
    return table


def _distance(distance: float | None, noise: float) -> Text:
    if distance is None:
        return Text("–")
    # In this form NaN does not match and is highlighted.
    matches = abs(distance) <= noise
    return Text(f"{distance:+.4f}", style="green" if matches else "bold red")
