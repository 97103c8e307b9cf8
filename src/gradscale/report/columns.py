"""Table layout, and tensor names shortened to a column width."""

from rich import box
from rich.table import Table


def table_of(*columns: str) -> Table:
    """Return an empty table; titles with a leading > are right-aligned, unwrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"), justify="right" if right else "left", no_wrap=right
        )
    return table


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
