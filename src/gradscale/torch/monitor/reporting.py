"""Reports locations found by the module hooks; writes the bundle of a stopped run."""

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

# The parent folder of bundles where there is no run file.
BUNDLES = Path()


class LocationReport:
    """Prints and records locations of non-finite values, each module once.

    Args:
        recorder: Writes the run file; None for none.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._reported: set[tuple[str | None, str]] = set()

    def report(self, location: Location, step: int) -> None:
        """Record and print the location in a step, if it is new."""
        key = location.module, location.direction
        if not location.found or key in self._reported:
            return
        self._reported.add(key)
        code = Verdict.OVERFLOW.value if location.loss_finite else "GS203"
        if self._recorder is not None:
            fields = location.as_dict()
            self._recorder.event(code, step=step, where=location.module, data=fields)
        text = f"{code} step {step}: first non-finite value\n{location.text()}"
        say(text, self._recorder, rank=process_here().rank)

    def clear(self) -> None:
        """Allow every module to be reported again."""
        self._reported.clear()


def bundle(
    finding: Finding,
    records: Iterable[StepRecord],
    state: Callable[[], dict[str, Any]],
    recorder: Recorder | None,
) -> str:
    """Write a bundle, on rank 0 only; return the line of the message that names it.

    Args:
        finding: The reason why the run is stopped.
        records: The last steps.
        state: Returns the scaler's state.
        recorder: The bundle is written beside its file.
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
