"""Tables that fit the terminal, and tensor names shortened to a column width."""

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from gradscale.core.formatting import printable

# Blanks between two columns: padding on both sides of an invisible rule.
_GAP = 3
# Names are shortened to this width before a column is dropped.
_SHORT_NAME = 20

Cell = str | Text


class Column(NamedTuple):
    """A column of figures.

    Attributes:
        title: Its heading.
        priority: On a narrow terminal the column with the highest number is dropped
            first; one with 0 never.
        right: Align right.
    """

    title: str
    priority: int = 0
    right: bool = True


def table_of(*columns: str) -> Table:
    """Return an empty table; titles with a leading > are right-aligned, unwrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"), justify="right" if right else "left", no_wrap=right
        )
    return table


def fitted_table(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    short_name: int = _SHORT_NAME,
) -> Table:
    """Return a table of names and figures that fits a width.

    Names are shortened, and columns dropped, until it fits.

    Args:
        title: The heading of the names.
        columns: The other columns.
        rows: A name and one cell for each of `columns`; missing ones are empty.
        width: In characters.
        short_name: Names are shortened to this width before a column is dropped.
    """
    names = [_plain(row[0]) for row in rows]
    longest = max(cell_len(text) for text in (title, *names))
    widths = [
        max(
            cell_len(_plain(cell))
            for cell in (column.title, *(row[n] for row in rows if n < len(row)))
        )
        for n, column in enumerate(columns, start=1)
    ]
    shown = list(range(len(columns)))

    def name_width() -> int:
        return width - sum(widths[place] + _GAP for place in shown)

    while name_width() < min(longest, short_name):
        place = max(shown, key=lambda place: columns[place].priority, default=-1)
        if place < 0 or not columns[place].priority:
            break
        shown.remove(place)
    table = table_of(title)
    for place in shown:
        heading, _, right = columns[place]
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    table.columns[0].no_wrap = True
    for row, name in zip(rows, names, strict=True):
        style = row[0].style if isinstance(row[0], Text) else ""
        cells = [row[place + 1] if place + 1 < len(row) else "" for place in shown]
        table.add_row(Text(shortened(name, max(8, name_width())), style=style), *cells)
    return table


def _plain(cell: Cell) -> str:
    return printable(cell.plain if isinstance(cell, Text) else cell)


def shortened(name: str, width: int) -> str:
    """Return a name cut to `width` characters in its middle.

    Tensor names differ at both ends: layer at the front, parameter at the back.

    >>> shortened("encoder.layers.11.attention.query.weight", 24)
    'encoder.lay…query.weight'
    >>> shortened("head.bias", 24)
    'head.bias'
    """
    if len(name) <= width:
        return name
    front = (width - 1) // 2
    return f"{name[:front]}…{name[len(name) - (width - 1 - front) :]}"
