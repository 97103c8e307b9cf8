"""Output that several commands share: screens, JSON, figures. Not a command."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from gradscale.core.formatting import printable

# Characters in a line of a pipe, which has no width.
UNLIMITED = 10_000

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class Screen:
    """Renders content that may hold text of any origin.

    Control characters are shown as escapes, and no line ends in blanks.
    """

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Yield the segments of each line."""
        for line in Segment.split_lines(console.render(self._content, options)):
            cells = [
                Segment(printable(text), style, control)
                for text, style, control in line
            ]
            while cells and not cells[-1].text.strip():
                cells.pop()
            if cells:
                text, style, control = cells.pop()
                cells.append(Segment(text.rstrip(), style, control))
            yield from cells
            yield Segment.line()


def console_of(*, width: int | None = None) -> Console:
    """Return the console of stdout. Text is never parsed as markup.

    Args:
        width: In characters; None for that of the terminal, 80 in a pipe.
    """
    return Console(highlight=False, markup=False, emoji=False, width=width)


def table_width(console: Console) -> int:
    """Return the width for tables: no limit in a pipe, unless COLUMNS is set."""
    limited = console.is_terminal or "COLUMNS" in os.environ
    return console.width if limited else UNLIMITED


def show(
    content: RenderableType, *, soft_wrap: bool = False, width: int | None = None
) -> None:
    """Print content on stdout.

    Args:
        content: Text, tables, or a group of them.
        soft_wrap: Do not break lines.
        width: As for `console_of`.
    """
    console_of(width=width).print(Screen(content), soft_wrap=soft_wrap)


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
    """Print data as indented JSON without NaN and Infinity, in ASCII."""
    typer.echo(json.dumps(json_value(data, nonfinite), indent=2))


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


def save_figure(draw: Callable[[], Any], path: Path) -> str:
    """Write a figure as PNG; return the cause of a failure, empty on success.

    Args:
        draw: Imports the plotting library and returns the chart.
        path: The target.
    """
    try:
        # Imported here: the screens need no plotting library.
        from gradscale.report.figure_theme import save_png

        save_png(draw(), path)
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "vl_convert"):
            raise
        return str(error)
    return ""


def end_with_figure(path: Path, trouble: str, *, announce: bool) -> None:
    """End a command that draws; exit with code 1 if the figure is missing.

    Args:
        path: Of the figure.
        trouble: As returned by `save_figure`.
        announce: Print the path.
    """
    if trouble:
        typer.echo(f"Error: {trouble}", err=True)
        raise typer.Exit(1)
    if announce:
        show(f"\nFigure written to {path}", soft_wrap=True)


def prints_braille(console: Console) -> bool:
    """Return whether the console's encoding has Braille characters."""
    return console.encoding.lower().startswith("utf")
