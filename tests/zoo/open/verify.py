"""Checks under torch's own scaler that each repair cures its fault.

    python tests/zoo/open/verify.py [case ...]

Runs the scripts one after another, prints a table, and ends with the failed checks.
`cases.toml` describes the cases:

    fault   what is wrong in sick.py; `looks` in a case that has only well.py
    cause   the kind of fault
    also    other causes that are right for the same fault
    place   names of modules, parameters or other places that count as right
    since   the call of scaler.update() at which the trouble begins, from 1
    shows   the figure in which the repair is seen: loss, scale, skips or weights
    runs    how often a script is run in the same folder; the last run counts
    level   why the loss of well.py does not fall within its few steps
"""

import difflib
import json
import math
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
CAUSES = {
    "scale-too-high",
    "forward-op",
    "loss-op",
    "backward-op",
    "bad-batch",
    "input-range",
    "learning-rate",
    "weights-written",
    "gradient-growth",
    "scale-too-low",
    "clipped-scaled",
    "unscaled-twice",
    "update-missing",
    "update-too-often",
    "backward-unscaled",
    "stepped-directly",
    "zeroed-early",
    "never-zeroed",
    "scaler-made-anew",
    "not-in-optimizer",
    "fp16-weights",
    "no-float16",
}
# Sums differ with the number of threads.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def run(script: Path, times: int) -> dict | None:
    """Return the figures that a script prints last; None if it does not end well."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            done = subprocess.run(
                [sys.executable, str(script)],
                cwd=folder,
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=120,
            )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return None
    figures = json.loads(done.stdout.splitlines()[-1])
    for name in ("first_loss", "last_loss"):
        figures[name] = float(figures[name])
    figures["lost"] = figures["skipped"] / (figures["taken"] + figures["skipped"])
    # Where the scale calibrates, the script counts the skips after step 30.
    late = figures.get("late_skips", figures["skipped"])
    figures["late"] = late / (figures["taken"] + figures["skipped"])
    return figures


def is_healthy(well: dict, falls: bool) -> bool:
    """Return whether a loss falls, or stays finite, and few steps are skipped."""
    learned = well["last_loss"] <= 0.9 * well["first_loss"] or not falls
    return math.isfinite(well["last_loss"]) and learned and well["late"] <= 0.08


def shows(fault: str, sick: dict, well: dict) -> bool:
    """Return whether the fault is seen in sick.py and not in well.py."""
    match fault:
        case "loss":
            lost = not math.isfinite(sick["last_loss"])
            return lost or sick["last_loss"] >= 1.5 * well["last_loss"]
        case "scale":
            low, high = sorted([sick["scale"], well["scale"]])
            return high >= 16 * low
        case "skips":
            return sick["lost"] >= 0.1
        case "weights":
            return not all(sick["moved"].values()) and all(well["moved"].values())
    raise ValueError(f"shows={fault!r} is not loss, scale, skips or weights.")


def changed_lines(folder: Path) -> int:
    """Return how many lines the twins do not share, the larger of both counts."""
    sick, well = (
        (folder / f"{twin}.py").read_text().splitlines() for twin in ("sick", "well")
    )
    marks = [line[0] for line in difflib.ndiff(sick, well)]
    return max(marks.count("-"), marks.count("+"))


def failures(name: str, case: dict) -> list[str]:
    """Run a case, print its rows, and return the checks that it fails."""
    folder, failed = HERE / name, []
    twins = ["sick", "well"] if "cause" in case else ["well"]
    if {path.stem for path in folder.glob("*.py")} != set(twins):
        failed.append(f"has not the scripts {twins}")
    figures = {}
    for twin in twins:
        found = figures[twin] = run(folder / f"{twin}.py", case.get("runs", 1))
        if found is None:
            failed.append(f"{twin}.py does not end with exit code 0")
            continue
        print(
            f"{name:26} {twin:5} {found['first_loss']:10.4g} {found['last_loss']:10.4g}"
            f" {found['scale']:10.3g} {found['taken']:6d} {found['skipped']:7d}"
            f"  {case.get('cause', 'healthy')}, {case.get('shows', '-')}",
            flush=True,
        )
    well = figures["well"]
    if well is not None and not is_healthy(well, falls="level" not in case):
        failed.append("well.py is not healthy")
    if "cause" not in case:
        return failed
    if case["cause"] not in CAUSES:
        failed.append(f"cause {case['cause']!r} is not one of the list")
    if changed_lines(folder) != 1:
        failed.append("twins differ in more than a line")
    sick = figures["sick"]
    if sick and well and not shows(case["shows"], sick, well):
        failed.append(f"the fault is not seen in the {case['shows']}")
    return failed


def main() -> int:
    cases = tomllib.loads((HERE / "cases.toml").read_text())
    failed = []
    if {path.parent.name for path in HERE.glob("*/*.py")} != set(cases):
        failed.append("cases.toml and the folders do not name the same cases")
    columns = f"{'first':>10} {'last':>10} {'scale':>10} {'taken':>6} {'skipped':>7}"
    print(f"{'case':26} {'twin':5} {columns}")
    for name in sys.argv[1:] or cases:
        failed += [f"{name}: {check}" for check in failures(name, cases[name])]
    pairs = sum("cause" in case for case in cases.values())
    print(
        f"{pairs} pairs, {len(cases) - pairs} healthy scripts, {len(failed)} failures"
    )
    print(*failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
