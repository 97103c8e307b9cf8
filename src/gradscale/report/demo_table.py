"""Tables for the terminal."""

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
        final_loss: After the last step.
        distance: Of that loss to the reference's; None for the reference.
        lost_share: Of the gradient elements, in [0, 1].
        skipped: How many steps.
        scale: At the last step; None where nothing scales.
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
        rows: The reference among them.
        noise: What the seed alone changes: distances beyond it stand out.
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
    # Written so that a distance that is not finite stands out.
    matches = abs(distance) <= noise
    return Text(f"{distance:+.4f}", style="green" if matches else "bold red")
