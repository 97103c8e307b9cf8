"""What a scaler says to people: in the log, on stderr, in a folder of evidence."""

import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gradscale.core.findings import Finding
from gradscale.core.verdicts import StepRecord, Verdict
from gradscale.torch.bundles import write_bundle
from gradscale.torch.culprits import Diagnosis
from gradscale.torch.recording import Recorder, rank_here

# Where bundles go if there is no run file beside which they could lie.
BUNDLES = Path()

_log = logging.getLogger("gradscale")


def say(text: str, recorder: Recorder | None, *, normal: bool = False) -> None:
    """Log, or print where nobody listens; on rank 0 alone.

    Args:
        text: What to say.
        recorder: One that is quiet says it in its file alone.
        normal: It is nothing to worry about.
    """
    if (recorder is not None and recorder.quiet) or rank_here() != 0:
        return
    if _log.hasHandlers():
        _log.log(logging.INFO if normal else logging.WARNING, text)
    else:
        print(f"gradscale {text}", file=sys.stderr)


class Places:
    """Says where a value stopped being finite, each place once.

    Args:
        recorder: As for `say`.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._said: set[tuple[str | None, str]] = set()

    def say(self, seen: Diagnosis, step: int) -> None:
        """Write down and say what the instruments saw in a step, if it is new."""
        place = seen.module, seen.direction
        if not seen.found or place in self._said:
            return
        self._said.add(place)
        code = Verdict.OVERFLOW.value if seen.loss_finite else "GS203"
        if self._recorder is not None:
            facts = seen.as_dict()
            self._recorder.event(code, step=step, where=seen.module, data=facts)
        say(f"{code} step {step}: first not finite\n{seen.text()}", self._recorder)

    def clear(self) -> None:
        """Forget what was said: the next trouble has a place of its own."""
        self._said.clear()


def bundle(
    finding: Finding,
    records: Iterable[StepRecord],
    state: Callable[[], dict[str, Any]],
    recorder: Recorder | None,
) -> str:
    """Write a bundle, on rank 0 alone; return the line that names it.

    Args:
        finding: Why the run is stopped.
        records: The last steps.
        state: Returns the scaler's state.
        recorder: Beside its file the bundle is put.
    """
    if rank_here() != 0:
        return ""
    parent = BUNDLES
    if recorder is not None and recorder.path is not None:
        parent = recorder.path.parent
    try:
        folder = write_bundle(parent, finding, list(records), state())
    except OSError as error:
        return f"\n  bundle none: it could not be written ({error})"
    return f"\n  bundle {folder}"
