"""The evidence of a run that was stopped, in a folder."""

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradscale.core.findings import Finding
from gradscale.core.verdicts import StepRecord


def write_bundle(
    parent: Path,
    finding: Finding,
    records: Iterable[StepRecord],
    state: Mapping[str, Any],
) -> Path:
    """Write what is known of a failure; return the folder.

    It appears whole or not at all, and an earlier one is never written over. No batch,
    weight or gradient is in it.

    Args:
        parent: Where the folder goes.
        finding: Why the run was stopped.
        records: The last steps.
        state: The scaler's `state_dict()`.
    """
    files = {
        "finding.json": {**finding.as_dict(), "text": finding.text()},
        "steps.json": [record._asdict() for record in records],
        "scaler.json": dict(state),
        "versions.json": {
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "manifest.json": {
            "finding.json": "why the run was stopped",
            "steps.json": "the facts of the last steps",
            "scaler.json": "the scaler's state_dict()",
            "versions.json": "what it ran on",
            "user data": "none: no batch, weight or gradient is in this folder",
        },
    }
    parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".gradscale-bundle-", dir=parent))
    try:
        for name, content in files.items():
            text = json.dumps(content, indent=1, default=str)
            (made / name).write_text(text, encoding="utf-8")
        return _named(made, parent / f"gradscale-bundle-{finding.step}")
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
