"""The command line: one file a command."""

from typing import Annotated

import typer

from gradscale import __version__
from gradscale.cli.explain import explain

app = typer.Typer(
    name="gradscale",
    help="Keep half-precision training alive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(explain)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"gradscale {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
