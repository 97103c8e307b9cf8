"""Opens run files for the commands that read them. Not a command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from gradscale.cli._output import progress_bar
from gradscale.core.formatting import printable
from gradscale.errors import StateError
from gradscale.runfile import Run, open_run

# `doctor` uses 0 to 2 for its verdicts.
UNREADABLE = 3
# Shorter runs are read before a bar would be visible.
LONG = 50_000

File = Annotated[
    Path,
    typer.Argument(help="A run file, written by record= or by gradscale run."),
]


@contextmanager
def opened(*paths: Path) -> Iterator[tuple[Run, ...]]:
    """Open run files; exit with `UNREADABLE` and a message if one cannot be read."""
    runs: list[Run] = []
    try:
        for path in paths:
            runs.append(open_run(path))
        yield tuple(runs)
    except StateError as error:
        typer.echo(printable(f"Error: {error}"), err=True)
        raise typer.Exit(UNREADABLE) from error
    finally:
        for run in runs:
            run.close()


@contextmanager
def reading_progress(*runs: Run) -> Iterator[Callable[[int], None] | None]:
    """Yield a callback for the steps read; None for short runs, which show no bar."""
    total = sum(run.last_step for run in runs)
    bar = progress_bar(f"Reading {total:,} steps", total)
    with bar if total >= LONG else nullcontext() as on_steps:
        yield on_steps
