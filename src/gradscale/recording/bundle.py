"""The evidence of a run's last steps, in a folder."""

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradscale.core.records import StepRecord
from gradscale.judge.findings import Finding


def write_bundle(
    parent: Path,
    finding: Finding | None,
    records: Sequence[StepRecord],
    state: Mapping[str, Any],
    versions: Mapping[str, str],
    save_batch: Callable[[Path], None] | None = None,
) -> Path:
    """Write what is known of a run's last steps; return the folder.

    It appears whole or not at all, and an earlier one is never written over. No weight
    or gradient is in it, and no batch but one that was given.

    Args:
        parent: Where the folder goes.
        finding: What was found last; None if nothing was.
        records: The last steps.
        state: The scaler's `state_dict()`.
        versions: Of the framework, for `versions.json`.
        save_batch: Writes the batch to the file that it is given; None without one.
    """
    files: dict[str, Any] = {
        "steps.json": [record._asdict() for record in records],
        "scaler.json": dict(state),
        "versions.json": {**versions, "python": platform.python_version()},
    }
    about = {
        "steps.json": "the facts of the last steps",
        "scaler.json": "the scaler's state_dict()",
        "versions.json": "what it ran on",
    }
    if finding is not None:
        files["finding.json"] = {**finding.as_dict(), "text": finding.text()}
        about["finding.json"] = "what was found last"
    if save_batch is None:
        about["user data"] = "none: no batch, weight or gradient is in this folder"
    else:
        about["batch.pt"] = "the batch that was given, as torch.save writes it"
        about["user data"] = "batch.pt: think before you pass this folder on"
    files["manifest.json"] = about
    step = records[-1].step if records else 0
    parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".gradscale-bundle-", dir=parent))
    try:
        for name, content in files.items():
            text = json.dumps(content, indent=1, default=str)
            (made / name).write_text(text, encoding="utf-8")
        if save_batch is not None:
            save_batch(made / "batch.pt")
        step = step if finding is None else finding.step
        return _named(made, parent / f"gradscale-bundle-{step}")
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _named(made: Path, wanted: Path) -> Path:
    """Give the folder its name, or the next one that is free."""
    number, name = 1, wanted
    while True:
        try:
            # Fails where a folder that holds something is in the way.
            os.rename(made, name)
            return name
        except OSError:
            if not name.exists():
                raise
            number += 1
            name = wanted.with_name(f"{wanted.name}-{number}")
