"""The command line shared by the PyTorch benchmarks."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import result, torch_place, write


def parser_for(doc: str | None, what: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark.

    Args:
        doc: The docstring of the script, shown as its help.
        what: The name of the benchmark, as in the name of its script.
        rounds: Default number of timed turns of each implementation.
    """
    module = f"python -m benchmarks.bench_{what}"
    parser = argparse.ArgumentParser(
        prog=module,
        description=doc,
        epilog=f"example: {module} --device cuda --out results/{what}_h200.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="timed turns of each implementation (%(default)s)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--commit", default="", help="commit to record outside a git checkout"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    return parser


def add_only(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add the option that selects implementations by name."""
    listed = ", ".join(f'"{name}"' for name in names)
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=tuple(names),
        help=f"only this implementation; may be repeated: {listed}",
    )


def save(
    args: argparse.Namespace, what: str, rows: list[dict[str, Any]], **ceilings: float
) -> dict[str, Any]:
    """Write the JSON file if --out was given; return its contents.

    Called after each part of a benchmark, so that a later failure loses no rows.

    Args:
        args: From the parser above.
        what: The name of the benchmark.
        rows: The measurements.
        **ceilings: Limits of the device itself, stored beside the rows.
    """
    record = result(what, torch_place(args.device), rows, args.commit) | ceilings
    if args.out:
        write(args.out, record)
    return record


def show(
    args: argparse.Namespace,
    what: str,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    title: str,
    **ceilings: float,
) -> None:
    """Save the rows and print them, as a table or as JSON.

    Args:
        args, what, rows, **ceilings: As for `save`.
        columns: The field of each column of the table, by its heading.
        title: Heading of the table.
    """
    record = save(args, what, rows, **ceilings)
    if args.json:
        print(json.dumps(record))
    else:
        title = f"{title} ({record['device']})"
        Console(width=130).print(table(title, columns, rows))


def table(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> Table:
    """Return rows as a table for the terminal; a cell without a value is empty."""
    shown = Table(title=title)
    for heading, field in columns.items():
        words = any(isinstance(row.get(field), str) for row in rows)
        shown.add_column(heading, justify="left" if words else "right")
    for row in rows:
        shown.add_row(*(cell(row.get(field)) for field in columns.values()))
    return shown


def cell(value: Any) -> str:
    """Format a value: numbers with at least three digits.

    >>> cell(0.12345), cell(12345.6), cell(148), cell(None)
    ('0.123', '12346', '148', '')
    """
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
