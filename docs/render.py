"""Render the pages that come from data: `python -m docs.render [--check]`."""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from docs.measured import filled
from gradscale.judge.catalogue import CATALOGUE, GIVEN, Entry

ROOT = Path(__file__).parent.parent
CODES = ROOT / "docs" / "codes.md"
MEASURED = (
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "how-it-is-built.md",
    ROOT / "docs" / "jax.md",
    ROOT / "docs" / "torch.md",
)
HEAD = f"""\
# Codes

Every message of gradscale ends with a code in brackets, and every verdict on a step has
one: `scaler.last.verdict.code`. `gradscale explain GS201` prints a page of this list in
the terminal, without a network.

In the examples {GIVEN}

This page is made by `python -m docs.render` from `gradscale.judge.catalogue`.
"""


def codes_page() -> str:
    """Return the page of all codes, in Markdown."""
    parts = [HEAD]
    for title, entries in groupby(CATALOGUE, key=lambda entry: entry.section):
        parts.append(section(title, list(entries)))
    parts += [page(entry) for entry in CATALOGUE]
    return "\n".join(parts)


def section(title: str, entries: list[Entry]) -> str:
    """Return one section's table."""
    rows = [
        f"| [{entry.code}](#{anchor(entry)}) | {entry.name} | {entry.summary} |"
        for entry in entries
    ]
    head = [f"**{title}**", "", "| code | name | what it says |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def anchor(entry: Entry) -> str:
    """Return the anchor of an entry: its code, which never changes."""
    return entry.code.lower()


def page(entry: Entry) -> str:
    """Return one entry's page."""
    parts = [
        f'<a id="{anchor(entry)}"></a>',
        f"## {entry.code} {entry.name}",
        f"{entry.summary}.",
        f"**What it means.** {entry.meaning}",
        f"**Why it is bad.** {entry.why}",
        f"**Example**\n\n{fenced(entry.example)}",
    ]
    if entry.instead:
        parts.append(f"**Use instead**\n\n{fenced(entry.instead)}")
    steps = "\n".join(f"{i}. {text}" for i, text in enumerate(entry.advice, start=1))
    parts.append(f"**What to do**\n\n{steps}")
    if entry.references:
        listed = "\n".join(f"- <{address}>" for address in entry.references)
        parts.append(f"**References**\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def fenced(snippet: str) -> str:
    """Return a snippet as a Python block."""
    return f"```python\n{snippet.rstrip()}\n```"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages; with --check only report those that are out of date."""
    parser = argparse.ArgumentParser(prog="python -m docs.render", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if out of date"
    )
    check = parser.parse_args(arguments).check
    pages = {CODES: codes_page()}
    pages |= {path: filled(path.read_text(encoding="utf-8")) for path in MEASURED}
    stale = [
        path
        for path, wanted in pages.items()
        if not path.exists() or path.read_text(encoding="utf-8") != wanted
    ]
    if check:
        for path in stale:
            print(f"{path.name} is out of date. Run python -m docs.render.")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
