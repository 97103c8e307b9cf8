"""`gradscale report`: summarise a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradscale.cli._output import (
    AsJson,
    check_png,
    console_of,
    end_with_figure,
    print_json,
    prints_braille,
    save_figure,
    show,
    table_width,
)
from gradscale.cli._run_files import File, opened, reading_progress
from gradscale.diagnosis import Diagnosis, diagnose_run
from gradscale.report.run_screen import run_screen


def report(
    file: File,
    as_json: AsJson = False,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Also write this PNG: scale and loss against steps, and gradient "
            "exponents."
        ),
    ] = None,
) -> None:
    """Summarise a run: scale chart, verdicts, non-finite tensors, findings.

    The chart marks each step whose verdict is not ok by a letter. Tables show
    the number of steps by verdict, the tensors that were not finite, and the share of
    gradient elements lost to underflow. The run may still be in progress.

    - `gradscale report run.gs` – print one screen
    - `gradscale report run.gs --png run.png` – also draw the figures
    - `gradscale report run.gs --json` – print JSON

    The exit code is 0, 1 if the figure cannot be drawn because its library is not
    installed, or 3 if the file cannot be read. For an exit code per verdict use
    `gradscale doctor`.
    """
    if png is not None:
        check_png(png, "--png")
    with opened(file) as (run,), reading_progress(run) as on_steps:
        diagnosis = diagnose_run(run, on_steps=on_steps)
    trouble = "" if png is None else save_figure(lambda: _figure(diagnosis), png)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        console = console_of()
        braille, wide = prints_braille(console), table_width(console)
        screen = run_screen(diagnosis, console.width, table_width=wide, braille=braille)
        show(screen, width=wide)
    if png is not None:
        end_with_figure(png, trouble, announce=not as_json)


def _figure(diagnosis: Diagnosis) -> Any:
    from gradscale.report.run_figures import run_figure

    return run_figure(diagnosis)
