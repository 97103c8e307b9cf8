"""Run every scenario of tests/torch/test_defects.py on torch's and gradscale's scaler.

The scenarios of several ranks, tests/torch/parallel/defect_cases.py, run in two
processes.
"""

import argparse
import json
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gradscale.torch
from benchmarks.record import result, torch_place, write
from tests.torch.parallel.defect_cases import DEFECTS, PASSED
from tests.torch.parallel.launch import seen_by
from tests.torch.test_defects import SCENARIOS

CLASSES = {
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "gradscale": gradscale.torch.GradScaler,
}


def holds(scenario: Callable[[Any], None], kind: Any) -> bool:
    """Return whether the scaler passes the scenario."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scenario(kind)
        # Any failure is a result; pytest.fail raises a BaseException.
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt):
                raise
            return False
    return True


def measure() -> list[dict[str, Any]]:
    """Return one row per behaviour: how many of its variants each scaler passes."""
    variants: dict[str, list[Any]] = defaultdict(list)
    for param in SCENARIOS:
        scenario = param.values[0]
        variants[scenario.func.__name__.replace("_", " ")].append(scenario)
    return [
        {
            "behaviour": behaviour,
            "variants": len(scenarios),
            **{
                name: sum(holds(scenario, kind) for scenario in scenarios)
                for name, kind in CLASSES.items()
            },
        }
        for behaviour, scenarios in track(
            variants.items(), description="scenarios", console=Console(stderr=True)
        )
    ]


def measure_ranks() -> list[dict[str, Any]]:
    """Return one row per behaviour, measured on two ranks.

    Rows about FSDP1 use the `ShardedGradScaler` of torch and of gradscale.
    """
    with tempfile.TemporaryDirectory() as folder:
        seen = seen_by("tests.torch.parallel.defect_cases", 2, Path(folder))
    variants: dict[str, list[str]] = defaultdict(list)
    for name, defect in DEFECTS.items():
        variants[defect.scenario.func.__name__.replace("_", " ")].append(name)
    columns = dict(zip(CLASSES, ("torch", "ours"), strict=True))
    return [
        {
            "behaviour": behaviour.replace("fsdp1", "FSDP1"),
            "variants": len(names),
            **{
                column: sum(set(seen[f"{name}-{whose}"]) == {PASSED} for name in names)
                for column, whose in columns.items()
            },
        }
        for behaviour, names in variants.items()
    ]


def main() -> None:
    """Measure, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    args = parser.parse_args()
    rows = measure() + measure_ranks()
    record = result("defects", torch_place("cpu"), rows) | {"unit": "variants passed"}
    write(args.out, record)
    if args.json:
        print(json.dumps(record))
        return
    shown = Table("behaviour", *CLASSES, title="Variants passed")
    for row in record["rows"]:
        passed = [f"{row[name]} of {row['variants']}" for name in CLASSES]
        shown.add_row(row["behaviour"], *passed)
    Console().print(shown)


if __name__ == "__main__":
    main()
