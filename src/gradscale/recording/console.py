"""Reports findings to the log, or to stderr where no log handler is set."""

import logging
import os
import re
import sys
from contextlib import suppress
from textwrap import wrap
from typing import TextIO

_log = logging.getLogger("gradscale")
# The part of a line that its continuation lines are indented by.
_LABEL = re.compile(r"(?: {2}(?:try \d+|\S+)|gradscale:?) +")
# Commands are not broken: they are copied.
_COMMAND = re.compile(r"gradscale (?:doctor|report|explain) \S+")
# A finding or an event, which starts with its code.
_CODE = re.compile(r"GS\d{3}\b")


def say(text: str, *, rank: int, normal: bool = False) -> None:
    """Log a text, or print it to stderr if no log handler is set; on rank 0 alone.

    Nothing is logged or printed if the environment variable GRADSCALE_QUIET is set.

    Args:
        text: May have several lines.
        rank: The rank of this process.
        normal: The text reports no problem.
    """
    if rank != 0 or is_silenced():
        return
    if _log.hasHandlers():
        _log.log(logging.INFO if normal else logging.WARNING, text)
    else:
        print_to_stderr(f"gradscale{'' if _CODE.match(text) else ':'} {text}")


def is_silenced() -> bool:
    """Return whether the environment variable GRADSCALE_QUIET silences all output."""
    return os.environ.get("GRADSCALE_QUIET", "") not in ("", "0")


def print_to_stderr(text: str) -> None:
    """Print a text to stderr, wrapped on a terminal and clear of tqdm's bars.

    A stream that is closed, a broken pipe, or one whose encoding lacks a character does
    not end the run.

    Args:
        text: May have several lines.
    """
    stream = sys.stderr
    if stream is None:
        return
    # Only a tqdm that the script has loaded can have a bar on the screen.
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with suppress(OSError, ValueError):
        width = _terminal_width(stream)
        shown = text if width is None else wrapped(text, width)
        if bars is None:
            print(shown, file=stream)
        else:
            bars.write(shown, file=stream)


def wrapped(text: str, width: int) -> str:
    """Return a text broken at blanks, each line indented by its own label.

    Commands are kept whole, and so are words that are too long: names and paths.

    >>> print(wrapped("  where  the batch\\n  try 1  Look at the data.", 20))
      where  the batch
      try 1  Look at the
             data.

    Args:
        text: May have several lines.
        width: In characters.
    """
    lines: list[str] = []
    for line in text.splitlines():
        label = _LABEL.match(line)
        indent = label.end() if label is not None else 2
        # Text is not broken at no-break spaces.
        whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\xa0"), line)
        lines += wrap(
            whole,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines).replace("\xa0", " ")


def _terminal_width(stream: TextIO) -> int | None:
    """Return the width of a terminal in characters; None for a pipe or a file."""
    # A script may replace stderr by an object that can write and nothing else.
    is_terminal = getattr(stream, "isatty", bool)
    if not is_terminal():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    # 0: a terminal of unknown size.
    return os.get_terminal_size(stream.fileno()).columns or 80
