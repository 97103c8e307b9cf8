"""Recording an apex script that `gradscale run` has started."""

import os
from functools import cache
from typing import Any

from gradscale.recording.recorder import Recorder
from gradscale.recording.shared_recorder import SharedFiles
from gradscale.torch.attach.patch import Session, recorder_of


def run_recorder(**settings: Any) -> Recorder | None:
    """Return a recorder of the run file of `gradscale run`; None outside of it.

    Args:
        settings: Arguments of `SharedRecorder`.
    """
    file = os.environ.get("GRADSCALE_RUN_FILE")
    notes = os.environ.get("GRADSCALE_RUN_NOTES")
    if file is None or notes is None:
        return None
    session = _session(file, notes)
    session.note(made="LossScaler", enabled=True)
    return recorder_of(session, **settings)


@cache
def _session(file: str, notes: str) -> Session:
    return Session(file, notes, SharedFiles())
