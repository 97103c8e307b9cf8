"""`gradscale report`: summarise a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from gradscale.cli._output import AsJson, check_png, print_json, prints_braille
from gradscale.cli._run_files import File, opened, reading_progress
from gradscale.diagnosis import diagnose_run
from gradscale.report.run_screen import run_screen

if TYPE_CHECKING:
    from gradscale.diagnosis import Diagnosis


def report(
    file: File,
    as_json: AsJson = False,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Also write this PNG: scale against steps, and gradient exponents."
        ),
    ] = None,
) -> None:
    """Summarise a run: scale chart, verdicts, non-finite tensors, findings.

    The chart marks every step with a verdict other than ok by a letter. Tables show
    the number of steps by verdict, the tensors that were not finite, and the share of
    gradient elements lost to underflow. The run may still be in progress.

    - `gradscale report run.gs` – print one screen
    - `gradscale report run.gs --png run.png` – also draw the figures
    - `gradscale report run.gs --json` – print JSON

    The exit code is 0, or 3 if the file cannot be read. For an exit code per verdict
    use `gradscale doctor`.
    """
    if png is not None:
        check_png(png, "--png")
    with opened(file) as (run,), reading_progress(run) as on_steps:
        diagnosis = diagnose_run(run, on_steps=on_steps)
    if png is not None:
        _draw(diagnosis, png)
    if as_json:
        print_json(diagnosis.as_dict())
        return
    console = Console(highlight=False)
    braille = prints_braille(console)
    console.print(run_screen(diagnosis, console.width, braille=braille))
    if png is not None:
        console.print(f"\nFigure written to {png}", soft_wrap=True)


def _draw(diagnosis: "Diagnosis", png: Path) -> None:
    try:
        # Imported here: the screen needs no plotting library.
        from gradscale.report.figure_theme import save_png
        from gradscale.report.run_figures import run_figure
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "vl_convert"):
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    save_png(run_figure(diagnosis), png)
