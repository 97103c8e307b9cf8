"""The one shape of a benchmark's result, and the table that is printed from it."""

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile of times in ms."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {"p20": fifths[0], "p50": statistics.median(times), "p80": fifths[3]}


def result(
    what: str, device: str, rows: list[dict[str, Any]], commit: str = ""
) -> dict[str, Any]:
    """Return rows with all that is needed to judge them later.

    Args:
        what: The name of the benchmark.
        device: "cpu" or "cuda".
        rows: What was measured.
        commit: For a copy of the tree that is no git checkout.
    """
    return {
        "format": 1,
        "what": what,
        "commit": commit or _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device_name(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "unit": "ms",
        "rows": rows,
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def device_name(device: str) -> str:
    """Return a name that means something on another machine."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return run.stdout.strip() or "unknown"
