"""What commands that read run files share: no command of its own."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from gradscale.errors import StateError
from gradscale.runfile import Run, open_run

# 0 to 2 say how a run is; what cannot be read has no such answer.
UNREADABLE = 3
# Fewer steps than these are read before a bar could be seen.
LONG = 50_000

File = Annotated[
    Path,
    typer.Argument(help="A run file, as record= or gradscale run has written it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def reading(*paths: Path) -> Iterator[tuple[Run, ...]]:
    """Open run files; what cannot be read ends the command with a message."""
    runs: list[Run] = []
    try:
        for path in paths:
            runs.append(open_run(path))
        yield tuple(runs)
    except StateError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(UNREADABLE) from error
    finally:
        for run in runs:
            run.close()


@contextmanager
def progress(*runs: Run) -> Iterator[Callable[[int], None] | None]:
    """Show on stderr how far the reading of long runs is, if that is a terminal."""
    console = Console(stderr=True)
    total = sum(run.last_step for run in runs)
    if total < LONG or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"Reading {total:,} steps", total=total)
        yield lambda steps: bar.advance(task, steps)


def print_json(data: object) -> None:
    """Print data as JSON that every program reads: no NaN, no infinity."""
    typer.echo(json.dumps(plain(data), indent=2, ensure_ascii=False))


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; what is not finite becomes its name.

    >>> plain({"loss": float("nan"), "amax": [1.5, float("inf")]})
    {'loss': 'nan', 'amax': [1.5, 'inf']}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def draws_dots(console: Console) -> bool:
    """Tell whether Braille can be written to a console."""
    return console.encoding.lower().startswith("utf")
