"""Output that several commands share: JSON, progress bar, PNG target. Not a command."""

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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def progress_bar(
    description: str, total: int, *, announce: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; yield a callback that advances it.

    Args:
        description: Shown before the bar.
        total: The count at which the bar is full.
        announce: Print the description as one line where stderr is not a terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        if announce:
            typer.echo(f"{description}.", err=True)
        yield lambda count: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def print_json(data: object, *, nonfinite: Callable[[float], Any] = str) -> None:
    """Print data as indented JSON without NaN and Infinity."""
    value = json_value(data, nonfinite)
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def json_value(value: Any, nonfinite: Callable[[float], Any] = str) -> Any:
    """Return a value that JSON can hold: `nonfinite` replaces NaN and infinities.

    >>> json_value({"loss": float("nan"), "amax": (1.5, float("inf"))})
    {'loss': 'nan', 'amax': [1.5, 'inf']}
    >>> json_value([float("nan"), 2.0], nonfinite=lambda value: None)
    [None, 2.0]
    """
    if isinstance(value, dict):
        return {str(key): json_value(item, nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, nonfinite) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite(value)
    return value


def check_png(path: Path, option: str) -> None:
    """Refuse a path that no PNG can be written to.

    Args:
        path: The target.
        option: The option that named it, for the message.
    """
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(
            f"{path} does not end in .png. The figure is written as PNG. Give a name "
            f"such as {path.stem or 'figure'}.png.",
            param_hint=option,
        )
    if not path.parent.is_dir():
        raise typer.BadParameter(
            f"The folder {path.parent} does not exist, so the figure cannot be written "
            "there. Create it, or give another path.",
            param_hint=option,
        )


def prints_braille(console: Console) -> bool:
    """Return whether the console's encoding has Braille characters."""
    return console.encoding.lower().startswith("utf")
