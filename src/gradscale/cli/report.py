"""`gradscale report`: one run on one screen."""

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
            help="Also draw the scale against steps and the exponents of the "
            "gradients, into this PNG."
        ),
    ] = None,
) -> None:
    """Show what a run was like, from the verdict to the advice.

    The scale as a chart with a letter for every step that was not ok, how often each
    verdict was given, which tensors were not finite, what the scale loses at the
    small end, and the findings. The run may still be going on.

    - `gradscale report run.gs` prints one screen
    - `gradscale report run.gs --png run.png` draws the figures too
    - `gradscale report run.gs --json` prints the same for a program

    The exit code is 0, or 3 if the file cannot be read; `gradscale doctor` has one
    for each verdict.
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
        console.print(f"\nThe figures are in {png}", soft_wrap=True)


def _draw(diagnosis: "Diagnosis", png: Path) -> None:
    try:
        # Here and not above: the screen needs no plotting library.
        from gradscale.report.figure_theme import save_png
        from gradscale.report.run_figures import run_figure
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "vl_convert"):
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    save_png(run_figure(diagnosis), png)
