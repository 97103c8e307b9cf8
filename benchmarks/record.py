"""The format of a benchmark's result."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile of times in ms."""
    if len(times) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), times[0])
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {"p20": fifths[0], "p50": statistics.median(times), "p80": fifths[3]}


class Place(NamedTuple):
    """The machine and libraries of a measurement.

    Attributes:
        device: Name of the device.
        versions: Of the framework.
    """

    device: str
    versions: dict[str, str]


def torch_place(device: str) -> Place:
    """Return the place of torch on "cpu" or "cuda"."""
    import torch

    name = f"CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    versions = {"torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    return Place(name, versions)


def jax_place() -> Place:
    """Return the place of JAX's default device."""
    import flax
    import jax
    import optax

    device = jax.devices()[0]
    name = f"CPU, {os.cpu_count()} cores"
    if device.platform != "cpu":
        name = device.device_kind
    libraries = (jax, flax, optax)
    return Place(name, {lib.__name__: lib.__version__ for lib in libraries})


def result(
    what: str, place: Place, rows: list[dict[str, Any]], commit: str = ""
) -> dict[str, Any]:
    """Return rows together with commit, date, device and versions.

    Args:
        what: The name of the benchmark.
        place: Machine and libraries.
        rows: The measurements.
        commit: Needed outside a git checkout.
    """
    return {
        "format": 1,
        "what": what,
        "commit": commit or _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": place.device,
        "versions": {"python": platform.python_version(), **place.versions},
        "unit": "ms",
        "rows": rows,
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the record atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def _commit() -> str:
    """Return the measured commit, marked if the tree has changes besides results."""
    others = ("--", ":(top)", ":(top,exclude)benchmarks/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", *others)
    name = _git("describe", "--always") or "unknown"
    return f"{name}-dirty" if changed else name


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return run.stdout.strip()
