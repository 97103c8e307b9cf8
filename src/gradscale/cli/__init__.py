"""The command line: one module per command."""

import sys
from importlib import import_module
from io import TextIOWrapper
from pkgutil import iter_modules
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command as click_command

from gradscale import __version__


class Command(TyperCommand):
    """A command whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, the help option included."""
        return _untyped_flags(super().get_params(ctx))


class Commands(TyperGroup):
    """Finds commands by module: each module defines a function of its own name.

    Modules with a leading underscore are not commands. A command is imported when it
    is called: `explain` loads no framework.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, the help option included."""
        return _untyped_flags(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        names = (module.name for module in iter_modules(__path__))
        return [name for name in names if not name.startswith("_")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, or None."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"gradscale.cli.{cmd_name}")
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        settings = getattr(module, "CONTEXT", None)
        declare = single.command(cmd_name, cls=Command, context_settings=settings)
        declare(getattr(module, cmd_name))
        return click_command(single)


def _untyped_flags(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if isinstance(each, TyperOption) and each.is_flag:
            each.metavar = ""
    return parameters


app = typer.Typer(
    cls=Commands,
    name="gradscale",
    help="Loss scaling for half-precision training: record runs and diagnose them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
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
    if isinstance(sys.stdout, TextIOWrapper):
        # Not every encoding has the characters of tables and names.
        sys.stdout.reconfigure(errors="replace")
    app()
