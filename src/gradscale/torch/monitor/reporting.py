"""Reports what the module hooks located, and writes a bundle where a run is stopped."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gradscale.core.records import StepRecord, Verdict
from gradscale.judge.findings import Finding
from gradscale.recording.bundle import write_bundle
from gradscale.recording.console import say
from gradscale.recording.recorder import Recorder
from gradscale.torch.locate.result import Location
from gradscale.torch.monitor.process import process_here

# Where bundles go if there is no run file beside which they could lie.
BUNDLES = Path()


class LocationReport:
    """Says where a value stopped being finite, each place once.

    Args:
        recorder: As for `say`.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._said: set[tuple[str | None, str]] = set()

    def say(self, seen: Location, step: int) -> None:
        """Write down and say what the instruments saw in a step, if it is new."""
        place = seen.module, seen.direction
        if not seen.found or place in self._said:
            return
        self._said.add(place)
        code = Verdict.OVERFLOW.value if seen.loss_finite else "GS203"
        if self._recorder is not None:
            facts = seen.as_dict()
            self._recorder.event(code, step=step, where=seen.module, data=facts)
        text = f"{code} step {step}: first not finite\n{seen.text()}"
        say(text, self._recorder, rank=process_here().rank)

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
    if process_here().rank != 0:
        return ""
    parent = BUNDLES
    if recorder is not None and recorder.path is not None:
        parent = recorder.path.parent
    try:
        versions = {"torch": torch.__version__}
        folder = write_bundle(parent, finding, list(records), state(), versions)
    except OSError as error:
        return f"\n  bundle none: it could not be written ({error})"
    return f"\n  bundle {folder}"
