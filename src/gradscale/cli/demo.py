"""`gradscale demo`: train a small model in five precisions."""

import warnings
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from gradscale.cli._output import (
    check_png,
    end_with_figure,
    print_json,
    progress_bar,
    save_figure,
    show,
)
from gradscale.demo.settings import Settings
from gradscale.errors import ConfigError
from gradscale.report.demo_table import ComparisonRow, comparison_table

if TYPE_CHECKING:
    from gradscale.demo.comparison import Comparison


class Device(str, Enum):
    """Device of the demo."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def demo(
    out: Annotated[
        Path,
        typer.Option(help="PNG to write: loss and scale against steps."),
    ] = Path("gradscale-demo.png"),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print all values and curves as JSON."),
    ] = False,
    device: Annotated[
        Device,
        typer.Option(help="auto uses the GPU if PyTorch finds one, else the CPU."),
    ] = Device.auto,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Optimizer steps of each run. The default takes about a minute on two "
            "CPU cores.",
        ),
    ] = Settings.steps,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Seed of weights and batches. FP32 also runs with the next two seeds, "
            "to measure the effect of the seed alone.",
        ),
    ] = Settings.seed,
) -> None:
    """Train a small model in five precisions to show the effect of loss scaling.

    A plain network of 19 hidden layers learns to predict the next character of the
    standard library's source text in FP32, BF16, and FP16 without scaling, with a
    static scale and with a dynamic scale. All runs use the same initial weights and
    the same batches.

    - `gradscale demo` – print the table and draw the figure
    - `gradscale demo --seed 1` – repeat with other weights
    - `gradscale demo --json` – print JSON instead of the table

    The exit code is 0, or 1 if PyTorch, or the library that draws the figure, is not
    installed.
    """
    check_png(out, "--out")
    # Torch warns if NumPy is missing; the demo does not use it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        # Imported here: other commands do not need torch.
        from gradscale.demo.comparison import chosen_device, compare, planned_runs
        from gradscale.demo.conclusions import headline, sentences
    except ModuleNotFoundError as error:
        raise _import_failure(error) from error
    try:
        device_name = chosen_device(device.value)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    settings = Settings(device=device_name, steps=steps, seed=seed)
    try:
        runs = len(planned_runs(settings))
        training = f"Training {runs} runs of {steps} steps on {device_name}"
        with progress_bar(training, runs * steps, announce=True) as advance:
            comparison = compare(settings, lambda: advance(1))
    except FileNotFoundError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    trouble = save_figure(lambda: _figure(comparison, headline(comparison)), out)
    conclusions = sentences(comparison)
    if as_json:
        data = _as_dict(comparison, conclusions, None if trouble else str(out))
        print_json(data, nonfinite=lambda value: None)
    else:
        _print(comparison, conclusions)
    end_with_figure(out, trouble, announce=not as_json)


def _figure(comparison: "Comparison", title: str) -> Any:
    from gradscale.report.demo_figure import comparison_figure

    return comparison_figure(
        comparison.runs,
        comparison.other_seeds,
        baseline=comparison.frequency_loss,
        title=title,
        subtitle=_setup(comparison),
    )


def _import_failure(error: ModuleNotFoundError) -> Exception:
    if error.name != "torch":
        return error
    typer.echo(
        "Error: torch is not installed. The demo trains with PyTorch and draws with "
        "altair. Run: pip install 'gradscale[torch,report]'",
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


def _print(comparison: "Comparison", conclusions: list[str]) -> None:
    show(Text(f"\n{_setup(comparison)}", style="dim"))
    show(comparison_table(_rows(comparison), noise=comparison.seed_noise))
    points = Table.grid(padding=(0, 1))
    for sentence in conclusions:
        points.add_row("•", sentence)
    show(points)


def _as_dict(
    comparison: "Comparison", conclusions: list[str], figure: str | None
) -> dict[str, Any]:
    return {
        **asdict(comparison),
        "seed_noise": comparison.seed_noise,
        "table": [asdict(row) for row in _rows(comparison)],
        "reading": conclusions,
        "figure": figure,
    }
