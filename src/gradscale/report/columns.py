"""Tables that fit the terminal, and tensor names shortened to a column width."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
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

    Names are shortened, by what they have in common first, and columns dropped, until
    it fits.

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
    short = short_names(names, max(8, name_width()))
    for row, name in zip(rows, short, strict=True):
        style = row[0].style if isinstance(row[0], Text) else ""
        cells = [row[place + 1] if place + 1 < len(row) else "" for place in shown]
        table.add_row(Text(name, style=style), *cells)
    return table


def _plain(cell: Cell) -> str:
    return printable(cell.plain if isinstance(cell, Text) else cell)


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Return distinct names of at most `width` characters.

    Names that are too long lose the modules that all of them begin with, then those
    that all of them end with, as many as needed. What is still too long is cut in its
    middle, or at its front if more names stay distinct.

    >>> layer = "base_model.model.transformer.h.{}.attn.c_attn.lora_A.default.weight"
    >>> short_names([layer.format(0), layer.format(1), "head.bias"], 40)
    ['…h.0.attn.c_attn.lora_A.default.weight', \
'…h.1.attn.c_attn.lora_A.default.weight', 'head.bias']
    >>> short_names([layer.format(0), layer.format(1)], 24)
    ['…h.0.attn.c_attn.lora_A', '…h.1.attn.c_attn.lora_A']
    """
    # Other rows of a table, such as "all tensors", are not names of tensors.
    long = [n for n in names if len(n) > width and "." in n and " " not in n]
    parts = [name.split(".") for name in dict.fromkeys(long)]
    front, back = _common(parts)
    # An index has no meaning without the name of its list.
    begins = [n for n in range(front + 1) if not any(p[n].isdecimal() for p in parts)]
    cuts = [(begin, 0) for begin in begins]
    cuts += [(begins[-1], end) for end in range(1, back + 1)] if begins else []
    short: dict[str, str] = {}
    for begin, end in cuts:
        short = {
            ".".join(each): ("…" if begin else "")
            + ".".join(each[begin:][: -end or None])
            for each in parts
        }
        if all(len(name) <= width for name in short.values()):
            break
    stripped = [short.get(name, name) for name in names]
    in_middle = [shortened(name, width) for name in stripped]
    at_front = [n if len(n) <= width else f"…{n[1 - width :]}" for n in stripped]
    return max(in_middle, at_front, key=lambda cut: len(set(cut)))


def _common(parts: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return how many parts all names have in common at the front and at the back."""
    if len(parts) < 2:
        return 0, 0
    shortest = min(map(len, parts))
    front = min(_alike(zip(*parts, strict=False)), shortest - 1)
    back = _alike(zip(*(each[::-1] for each in parts), strict=False))
    return front, min(back, shortest - front - 1)


def _alike(columns: Iterable[Sequence[str]]) -> int:
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


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
