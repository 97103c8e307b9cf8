"""`gradscale tail`: a run as it goes on."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gradscale.cli._output import AsJson, json_value, prints_braille
from gradscale.cli._run_files import File, opened
from gradscale.diagnosis.following import Follower, Seen
from gradscale.report.tail_screen import tail_screen, vitals


def tail(
    file: File,
    as_json: AsJson = False,
    every: Annotated[
        float,
        typer.Option(min=0.05, help="Seconds between two looks at the file."),
    ] = 0.5,
) -> None:
    """Follow a run while it goes on.

    Waits for a file that is not there yet, and ends when the run does, or by Ctrl-C.

    - `gradscale tail run.gs` draws the scale and the last figures, again and again
    - `gradscale tail run.gs > notes.txt` writes the findings as they come
    - `gradscale tail run.gs --json` prints a line for each step, and one for each
      finding, for programs

    The exit code is 0, or 3 if the file cannot be read.
    """
    console = Console(highlight=False)
    try:
        if as_json:
            _follow(file, every, _print_json, lambda text: None)
        elif console.is_terminal:
            _draw(file, every, console)
        else:
            _write(file, every, console)
    except KeyboardInterrupt:
        # The ordinary end of a command that follows.
        raise typer.Exit(0) from None


def _follow(
    file: Path,
    every: float,
    on_new: Callable[[Follower, list[Seen]], None],
    on_wait: Callable[[str], None],
) -> None:
    """Hand over what is new until the run has ended."""
    while not file.exists():
        on_wait(f"waiting for {file}")
        time.sleep(every)
    with opened(file) as (run,):
        follower = Follower(run)
        while True:
            on_new(follower, follower.poll())
            if follower.ended:
                return
            if not follower.behind:
                time.sleep(every)


def _print_json(follower: Follower, new: Iterable[Seen]) -> None:
    for row, verdict, findings in new:
        _print_line({**row._asdict(), "verdict": str(verdict), "code": verdict.code})
        for finding in findings:
            _print_line({"finding": finding.as_dict()})
    for finding in follower.messages:
        _print_line({"finding": finding.as_dict()})


def _print_line(data: object) -> None:
    # At once: who reads this may be waiting for the next line.
    print(json.dumps(json_value(data), ensure_ascii=False), flush=True)


def _draw(file: Path, every: float, console: Console) -> None:
    def on_new(follower: Follower, new: list[Seen]) -> None:
        braille = prints_braille(console)
        show(tail_screen(follower, str(file), console.width, braille=braille))

    def show(what: RenderableType) -> None:
        live.update(what, refresh=True)

    with Live(console=console, auto_refresh=False) as live:
        _follow(file, every, on_new, lambda text: show(Text(text, style="dim")))


def _write(file: Path, every: float, console: Console) -> None:
    last: list[str] = []

    def on_new(follower: Follower, new: list[Seen]) -> None:
        said = [finding for seen in new for finding in seen.findings]
        for finding in (*said, *follower.messages):
            console.print(finding.text(), markup=False, soft_wrap=True)
        if follower.ended and follower.last is None:
            console.print(f"{follower.health}: no step was recorded", soft_wrap=True)
        elif follower.ended:
            shown = ", ".join(
                f"{name} {text}" for name, text in vitals(follower).items()
            )
            console.print(f"{follower.health}: {shown}", markup=False, soft_wrap=True)

    def on_wait(text: str) -> None:
        if not last:
            console.print(text, markup=False, soft_wrap=True)
            last.append(text)

    _follow(file, every, on_new, on_wait)
