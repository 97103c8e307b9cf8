"""Columns of a table, and names that fit into them."""

from rich import box
from rich.table import Table


def columns_of(*columns: str) -> Table:
    """Return a table; columns that begin with > are flush right and never broken."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"), justify="right" if right else "left", no_wrap=right
        )
    return table


def shortened(name: str, room: int) -> str:
    """Return a name that fits, its middle left out: both ends tell tensors apart.

    >>> shortened("encoder.layers.11.attention.query.weight", 24)
    'encoder.lay…query.weight'
    >>> shortened("head.bias", 24)
    'head.bias'
    """
    if len(name) <= room:
        return name
    front = (room - 1) // 2
    return f"{name[:front]}…{name[len(name) - (room - 1 - front) :]}"
