"""`gradscale diff`: compare two runs."""

from pathlib import Path
from typing import Annotated

import typer

from gradscale.cli._output import AsJson, print_json, show
from gradscale.cli._run_files import opened, reading_progress
from gradscale.diagnosis import compare_runs
from gradscale.report.diff_screen import diff_screen


def diff(
    a: Annotated[Path, typer.Argument(help="A run file.")],
    b: Annotated[Path, typer.Argument(help="Another run file.")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs and find the first step at which they diverge.

    Prints scales, skips and verdicts of both runs, the settings that differ, and the
    first step at which scale, applied, verdict, loss, norm and peak are not equal.

    - `gradscale diff before.gs after.gs` – print both runs side by side
    - `gradscale diff run.gs resumed.gs && echo same` – check that a resumed run
      matches the uninterrupted one
    - `gradscale diff a.gs b.gs --json` – print JSON

    The exit code is 0 if both runs have the same steps, 1 if not, 3 if a file cannot
    be read.
    """
    with opened(a, b) as (one, two), reading_progress(one, two) as on_steps:
        comparison = compare_runs(one, two, on_steps=on_steps)
    if as_json:
        print_json(comparison.as_dict())
    else:
        show(diff_screen(comparison))
    raise typer.Exit(0 if comparison.same else 1)
