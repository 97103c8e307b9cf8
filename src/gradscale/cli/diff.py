"""`gradscale diff`: two runs side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradscale.cli._output import AsJson, print_json
from gradscale.cli._run_files import opened, reading_progress
from gradscale.diagnosis import compare_runs
from gradscale.report.diff_screen import diff_screen


def diff(
    a: Annotated[Path, typer.Argument(help="A run file.")],
    b: Annotated[Path, typer.Argument(help="Another run file.")],
    as_json: AsJson = False,
) -> None:
    """Show two runs side by side, and the first step at which they part.

    Scales, skips and verdicts of both, the settings that differ, and for scale,
    verdict, loss, norm and peak the first step at which they are not exactly equal.

    - `gradscale diff before.gs after.gs` prints both
    - `gradscale diff run.gs resumed.gs && echo same` tells whether a resumed run is
      the run that was not stopped
    - `gradscale diff a.gs b.gs --json` prints the same for a program

    The exit code is 0 if all steps are the same, 1 if not, 3 if a file cannot be
    read.
    """
    with opened(a, b) as (one, two), reading_progress(one, two) as on_steps:
        comparison = compare_runs(one, two, on_steps=on_steps)
    if as_json:
        print_json(comparison.as_dict())
    else:
        Console(highlight=False).print(diff_screen(comparison))
    raise typer.Exit(0 if comparison.same else 1)
