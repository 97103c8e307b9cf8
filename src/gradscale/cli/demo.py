"""`gradscale demo`: one small model in five precisions, side by side."""

import warnings
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradscale.cli._output import check_png, print_json, progress_bar
from gradscale.demo.settings import Settings
from gradscale.errors import ConfigError
from gradscale.report.demo_table import ComparisonRow, comparison_table

if TYPE_CHECKING:
    from gradscale.demo.comparison import Comparison


class Device(str, Enum):
    """Where the demo runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def demo(
    out: Annotated[
        Path,
        typer.Option(
            help="Where to write the figure: loss and scale against steps, as PNG."
        ),
    ] = Path("gradscale-demo.png"),
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print all figures and curves as JSON, for programs."
        ),
    ] = False,
    device: Annotated[
        Device,
        typer.Option(help="auto takes the GPU if PyTorch sees one, else the CPU."),
    ] = Device.auto,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Optimizer steps of each run. The default shows the difference and "
            "takes about a minute on two cores, less on more.",
        ),
    ] = Settings.steps,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of the weights and the batches. The same seed prints the same table; "
            "FP32 also runs with the next two, to show what a seed alone changes.",
        ),
    ] = Settings.seed,
) -> None:
    """Train a small model in five precisions and see what loss scaling does.

    A plain network of 19 hidden layers learns to predict the next character of the
    standard library's source text: in FP32, in BF16, and in FP16 bare, with a static
    scale and with a dynamic one. All start from the same weights and see the same
    batches.

    - `gradscale demo` prints the table and draws the figure
    - `gradscale demo --seed 1` does it again from other weights
    - `gradscale demo --json` prints the same for a program
    """
    check_png(out, "--out")
    # Torch says so when it is loaded without NumPy, which nothing here needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        # Here and not above: no other command should have to load these.
        from gradscale.demo.comparison import chosen_device, compare, planned_runs
        from gradscale.demo.conclusions import headline, sentences
        from gradscale.report.demo_figure import comparison_figure
        from gradscale.report.figure_theme import save_png
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    try:
        place = chosen_device(device.value)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    settings = Settings(device=place, steps=steps, seed=seed)
    try:
        runs = len(planned_runs(settings))
        training = f"Training {runs} runs of {steps} steps on {place}"
        with progress_bar(training, runs * steps, announce=True) as advance:
            comparison = compare(settings, lambda: advance(1))
    except FileNotFoundError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    chart = comparison_figure(
        comparison.runs,
        comparison.other_seeds,
        baseline=comparison.frequency_loss,
        title=headline(comparison),
        subtitle=_setup(comparison),
    )
    save_png(chart, out)
    if as_json:
        data = _as_dict(comparison, sentences(comparison), out)
        print_json(data, nonfinite=lambda value: None)
    else:
        _show(comparison, sentences(comparison), out)


def _missing(error: ModuleNotFoundError) -> Exception:
    if error.name not in ("torch", "altair", "vl_convert"):
        return error
    typer.echo(
        f"Error: {error.name} is not installed. The demo trains with PyTorch and draws "
        "with altair. Run: pip install 'gradscale[torch,report]'",
        err=True,
    )
    return typer.Exit(1)


def _rows(comparison: "Comparison") -> list[ComparisonRow]:
    return [
        ComparisonRow(
            name=run.name,
            final_loss=run.final_loss,
            distance=None if run is comparison.exact else comparison.distance(run),
            lost_share=run.lost_share,
            skipped=len(run.skipped),
            scale=run.scales[-1] if run.scales else None,
        )
        for run in comparison.runs
    ]


def _setup(comparison: "Comparison") -> str:
    s = comparison.settings
    return (
        f"{s.depth} hidden layers, {s.steps} steps of {s.batch} characters of Python's "
        f"source, seed {s.seed}, {s.device}"
    )


def _show(comparison: "Comparison", reading: list[str], out: Path) -> None:
    console = Console(highlight=False)
    console.print(f"\n{_setup(comparison)}", style="dim")
    console.print(comparison_table(_rows(comparison), noise=comparison.seed_noise))
    points = Table.grid(padding=(0, 1))
    for sentence in reading:
        points.add_row("•", sentence)
    console.print(points)
    console.print(f"\nThe figure is in {out}")


def _as_dict(comparison: "Comparison", reading: list[str], out: Path) -> dict[str, Any]:
    return {
        **asdict(comparison),
        "seed_noise": comparison.seed_noise,
        "table": [asdict(row) for row in _rows(comparison)],
        "reading": reading,
        "figure": str(out),
    }
