"""Reports findings to the log, or to stderr where no log handler is set."""

import logging
import sys

from gradscale.recording.recorder import Recorder

_log = logging.getLogger("gradscale")


def say(
    text: str, recorder: Recorder | None, *, rank: int, normal: bool = False
) -> None:
    """Log a text, or print it to stderr if no log handler is set; on rank 0 alone.

    Args:
        text: May have several lines.
        recorder: Nothing is printed if it is quiet.
        rank: The rank of this process.
        normal: The text reports no problem.
    """
    if (recorder is not None and recorder.quiet) or rank != 0:
        return
    if _log.hasHandlers():
        _log.log(logging.INFO if normal else logging.WARNING, text)
    else:
        print(f"gradscale {text}", file=sys.stderr)
