"""Run every scenario of tests/jax/test_defects.py on jmp, flax, MPX and gradscale."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.bench_defects import holds
from benchmarks.record import jax_place, result, write
from tests.jax.scalers import SCALERS
from tests.jax.test_defects import SCENARIOS


def measure() -> list[dict[str, Any]]:
    """Return one row per behaviour: 1 for each scaler that has it, else 0."""
    return [
        {
            "behaviour": scenario.__name__.replace("_", " "),
            **{name: int(holds(scenario, kind)) for name, kind in SCALERS.items()},
        }
        for scenario, *_ in track(
            SCENARIOS, description="scenarios", console=Console(stderr=True)
        )
    ]


def main() -> None:
    """Measure, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    args = parser.parse_args()
    record = result("jax_defects", jax_place(), measure()) | {"unit": "1 for passed"}
    write(args.out, record)
    if args.json:
        print(json.dumps(record))
        return
    shown = Table("behaviour", *SCALERS, title="Behaviours of each scaler")
    for row in record["rows"]:
        marks = ["yes" if row[name] else "no" for name in SCALERS]
        shown.add_row(row["behaviour"], *marks)
    Console().print(shown)


if __name__ == "__main__":
    main()
