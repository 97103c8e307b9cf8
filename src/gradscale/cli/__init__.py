"""The command line: one file a command."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command as built

from gradscale import __version__


class Commands(TyperGroup):
    """Every module of this folder is a command; its function has the same name.

    Those that begin with _ are what commands share.

    A command is imported when it is called: explaining a code needs no framework.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        names = (module.name for module in iter_modules(__path__))
        return [name for name in names if not name.startswith("_")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return one command, or None if there is none of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"gradscale.cli.{cmd_name}")
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        settings = getattr(module, "CONTEXT", None)
        alone.command(cmd_name, context_settings=settings)(getattr(module, cmd_name))
        return built(alone)


app = typer.Typer(
    cls=Commands,
    name="gradscale",
    help="Keep half-precision training alive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
