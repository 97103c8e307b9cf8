"""What a scaler says to people: in the log, on stderr, in a folder of evidence."""

import logging
import sys

from gradscale.recording.recorder import Recorder

_log = logging.getLogger("gradscale")


def say(
    text: str, recorder: Recorder | None, *, rank: int, normal: bool = False
) -> None:
    """Log, or print where nobody listens; on rank 0 alone.

    Args:
        text: What to say.
        recorder: One that is quiet says it in its file alone.
        rank: Of this process; only rank 0 prints.
        normal: It is nothing to worry about.
    """
    if (recorder is not None and recorder.quiet) or rank != 0:
        return
    if _log.hasHandlers():
        _log.log(logging.INFO if normal else logging.WARNING, text)
    else:
        print(f"gradscale {text}", file=sys.stderr)
