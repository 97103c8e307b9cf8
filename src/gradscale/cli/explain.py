"""`gradscale explain`: the documentation of a code."""

from collections.abc import Iterable
from dataclasses import asdict
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from gradscale.cli._output import AsJson, print_json, show
from gradscale.judge.catalogue import BY_CODE, CATALOGUE, GIVEN, Entry


def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="A code from a message or finding, such as GS201."),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--all", help="List all codes, one per line.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a code: its meaning, its consequences and the remedy.

    Every error, warning and finding of gradscale has a code, and so has the verdict on
    every step: `scaler.last.verdict.code`.

    - `gradscale explain GS201` – print one page
    - `gradscale explain --all` – list all codes
    - `gradscale explain GS201 --json` – print JSON
    """
    if (code is None) is not list_all:
        raise typer.BadParameter(
            "Give one code, such as GS201, or --all to list all codes.",
            param_hint="CODE",
        )
    if code is None:
        shown: RenderableType = all_codes(CATALOGUE)
        data: object = [asdict(entry) for entry in CATALOGUE]
    else:
        entry = find(code)
        shown, data = page(entry), asdict(entry)
    if as_json:
        print_json(data)
    else:
        show(shown)


def find(code: str) -> Entry:
    """Return the entry of a code, ignoring case; suggest similar codes on failure."""
    entry = BY_CODE.get(code.strip().upper())
    if entry is None:
        raise typer.BadParameter(
            f"{code} is not a code of this version of gradscale.{_nearest(code)} "
            "gradscale explain --all lists all codes.",
            param_hint="CODE",
        )
    return entry


def _nearest(code: str) -> str:
    by_name = {entry.name: entry.code for entry in CATALOGUE}
    typed = code.strip().lower()
    words = [*by_name, *(known.lower() for known in BY_CODE)]
    near = get_close_matches(typed, words, n=3, cutoff=0.6)
    codes = dict.fromkeys(by_name.get(word, word.upper()) for word in near)
    listed = ", ".join(f"{known} ({BY_CODE[known].name})" for known in codes)
    return f" Did you mean {listed}?" if listed else ""


def page(entry: Entry) -> RenderableType:
    """Return the page of one entry."""
    title = Text.assemble((entry.code, "bold"), " ", (entry.name, "bold cyan"))
    parts: list[RenderableType] = [
        title,
        Text(f"{entry.summary}."),
        *_part("What it means", Text(entry.meaning)),
        *_part("Why it matters", Text(entry.why)),
        *_part("Example", _python(entry.example)),
    ]
    if entry.instead:
        parts += _part("Use instead", _python(entry.instead))
    parts += _part("What to do", _steps(entry.advice))
    if entry.references:
        parts += _part("References", Text("\n".join(entry.references)))
    return Group(*parts, "", Text(GIVEN, style="dim"))


def _part(title: str, body: RenderableType) -> list[RenderableType]:
    return ["", Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def _python(snippet: str) -> RenderableType:
    return Syntax(
        snippet.rstrip(),
        "python",
        theme="ansi_dark",
        background_color="default",
        word_wrap=True,
    )


def _steps(advice: Iterable[str]) -> RenderableType:
    steps = Table.grid(padding=(0, 1))
    for number, text in enumerate(advice, start=1):
        steps.add_row(f"{number}.", Text(text))
    return steps


def all_codes(entries: Iterable[Entry]) -> RenderableType:
    """Return one table of entries per section."""
    tables: dict[str, Table] = {}
    for entry in entries:
        table = tables.setdefault(entry.section, Table.grid(padding=(0, 2)))
        line = Text.assemble((entry.name, "cyan"), f" – {entry.summary}")
        table.add_row(Text(entry.code, style="bold"), line)
    parts = [part for title, table in tables.items() for part in _part(title, table)]
    hint = Text("gradscale explain CODE prints one page.", style="dim")
    return Group(*parts[1:], "", hint)
