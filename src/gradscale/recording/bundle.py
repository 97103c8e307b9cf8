"""Writes the last steps of a run into a folder, for a bug report."""

import json
import os
import platform
import shutil
import sys
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
    run_file: Path | None = None,
) -> Path:
    """Write the facts of a run's last steps into a new folder; return the folder.

    The folder appears complete or not at all, and never replaces an earlier one. It
    holds no weights, no gradients, and a batch only if `save_batch` is given.

    Args:
        parent: The folder in which it is created.
        finding: The last finding; None if there is none.
        records: The last steps.
        state: The scaler's `state_dict()`.
        versions: Versions of the framework, for `versions.json`.
        save_batch: Writes the batch to a given file; None to leave it out.
        run_file: The record of the whole run, named in the manifest; None if there is
            none.
    """
    files: dict[str, Any] = {
        "steps.json": [record._asdict() for record in records],
        "scaler.json": dict(state),
        "versions.json": {
            "gradscale": sys.modules["gradscale"].__version__,
            **versions,
            "python": platform.python_version(),
        },
    }
    about = {
        "steps.json": "the facts of the last steps",
        "scaler.json": "the scaler's state_dict()",
        "versions.json": "versions of gradscale, Python and the framework",
        "run file": "none" if run_file is None else str(run_file),
    }
    if finding is not None:
        files["finding.json"] = {**finding.as_dict(), "text": finding.text()}
        about["finding.json"] = "the last finding"
    if save_batch is None:
        about["user data"] = "none: no batch, weight or gradient is in this folder"
    else:
        about["batch.pt"] = "the batch, as torch.save writes it"
        about["user data"] = "batch.pt: check it before you share this folder"
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
