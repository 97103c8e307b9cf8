"""`gradscale tail`: follow a run in progress."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gradscale.cli._output import (
    AsJson,
    Screen,
    console_of,
    json_value,
    prints_braille,
    show,
)
from gradscale.cli._run_files import File, opened
from gradscale.diagnosis.following import Follower
from gradscale.diagnosis.judged_run import JudgedRow
from gradscale.report.tail_screen import tail_screen, vitals


def tail(
    file: File,
    as_json: AsJson = False,
    every: Annotated[
        float,
        typer.Option(min=0.05, help="Seconds between two reads of the file."),
    ] = 0.5,
) -> None:
    """Follow a run in progress.

    Waits until the file exists, and ends when the run ends or on Ctrl-C.

    - `gradscale tail run.gs` – show a live screen with the scale and the last step
    - `gradscale tail run.gs > notes.txt` – write findings as they appear
    - `gradscale tail run.gs --json` – print one line of JSON per step and per finding

    The exit code is 0, or 3 if the file cannot be read.
    """
    console = console_of()
    try:
        if as_json:
            _follow(file, every, _print_json, lambda text: None)
        elif console.is_terminal:
            _draw(file, every, console)
        else:
            _write(file, every)
    except KeyboardInterrupt:
        # Ctrl-C is the normal way to stop following.
        raise typer.Exit(0) from None


def _follow(
    file: Path,
    every: float,
    on_new: Callable[[Follower, list[JudgedRow]], None],
    on_wait: Callable[[str], None],
) -> None:
    """Poll the file until the run has ended.

    Args:
        file: The run file; may not exist yet.
        every: Seconds between two polls.
        on_new: Called with the new steps after each poll.
        on_wait: Called with a message while the file does not exist.
    """
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


def _print_json(follower: Follower, new: Iterable[JudgedRow]) -> None:
    for row, _, verdict, findings in new:
        _print_line({**row._asdict(), "verdict": str(verdict), "code": verdict.code})
        for finding in findings:
            _print_line({"finding": finding.as_dict()})
    for finding in follower.messages:
        _print_line({"finding": finding.as_dict()})


def _print_line(data: object) -> None:
    # Flushed: the reader of a pipe may be waiting for this line.
    print(json.dumps(json_value(data)), flush=True)


def _draw(file: Path, every: float, console: Console) -> None:
    def on_new(follower: Follower, new: list[JudgedRow]) -> None:
        braille = prints_braille(console)
        draw(tail_screen(follower, str(file), console.width, braille=braille))

    def draw(screen: RenderableType) -> None:
        live.update(Screen(screen), refresh=True)

    with Live(console=console, auto_refresh=False) as live:
        _follow(file, every, on_new, lambda text: draw(Text(text, style="dim")))


def _write(file: Path, every: float) -> None:
    waiting: list[str] = []

    def on_new(follower: Follower, new: list[JudgedRow]) -> None:
        found = [finding for seen in new for finding in seen.findings]
        for finding in (*found, *follower.messages):
            show(finding.text(), soft_wrap=True)
        if follower.ended and follower.last is None:
            show("not judged: no steps recorded", soft_wrap=True)
        elif follower.ended:
            shown = ", ".join(
                f"{name} {text}" for name, text in vitals(follower).items()
            )
            show(f"{follower.health}: {shown}", soft_wrap=True)

    def on_wait(text: str) -> None:
        if not waiting:
            show(text, soft_wrap=True)
            waiting.append(text)

    _follow(file, every, on_new, on_wait)
