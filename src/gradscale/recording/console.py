"""Reports findings to the log, or to stderr where no log handler is set."""

import logging
import sys
from contextlib import suppress

_log = logging.getLogger("gradscale")


def say(text: str, *, rank: int, normal: bool = False) -> None:
    """Log a text, or print it to stderr if no log handler is set; on rank 0 alone.

    Args:
        text: May have several lines.
        rank: The rank of this process.
        normal: The text reports no problem.
    """
    if rank != 0:
        return
    if _log.hasHandlers():
        _log.log(logging.INFO if normal else logging.WARNING, text)
    elif sys.stderr is not None:
        # Closed, a broken pipe, or an encoding without a character of a name: a message
        # must not end the run.
        with suppress(OSError, ValueError):
            print(f"gradscale {text}", file=sys.stderr)
