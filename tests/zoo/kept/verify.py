"""Run every script under torch's own scaler, and check what `cases.toml` says of it.

    python tests/zoo/kept/verify.py [case ...]

A sick script must show its fault, and its twin, which differs in one line, must not.
"""

import difflib
import json
import os
import runpy
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it at the first step.

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


def run(script: Path) -> tuple[dict[str, Any], float]:
    """Return what a script prints last, and its CPU seconds.

    It runs in a fork, so that torch is imported once for all scripts.
    """
    with tempfile.TemporaryFile("w+") as printed:
        process = os.fork()
        if process == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            os.chdir(script.parent)
            sys.argv = [script.name]
            code = 1
            try:
                runpy.run_path(script.name, run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status, usage = os.wait4(process, 0)
        printed.seek(0)
        text = printed.read()
    assert status == 0, f"{script}: exit status {status}\n{text}"
    result = json.loads(text.splitlines()[-1], parse_constant=refuse)
    return result, usage.ru_utime + usage.ru_stime


def refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def check_healthy(out: dict[str, Any]) -> None:
    steps = out["taken"] + out["skipped"]
    assert out["last_loss"] != "nan", "the loss is NaN"
    assert out["last_loss"] < 0.8 * out["first_loss"], "the loss does not fall"
    # Where the scale calibrates, the script counts the skips after step 30.
    late = out.get("late_skips", out["skipped"])
    assert late <= 2 + 0.05 * steps, f"{late} of {steps} steps are skipped"
    assert all(out.get("moved", {}).values()), "a parameter does not move"


def check_sick(shows: str, sick: dict[str, Any], well: dict[str, Any]) -> None:
    match shows:
        case "loss":
            loss = sick["last_loss"]
            assert loss == "nan" or loss >= 1.5 * well["last_loss"], "the loss is fine"
        case "scale":
            low, high = sorted([sick["scale"], well["scale"]])
            assert low * 16 <= high, "the scales are alike"
        case "skips":
            steps = sick["taken"] + sick["skipped"]
            assert sick["skipped"] >= 0.1 * steps, "few steps are skipped"
        case "weights":
            assert not all(sick["moved"].values()), "every parameter moves"
        case _:
            raise AssertionError(f"shows = {shows!r} is unknown")


def check_repair(folder: Path) -> None:
    """Assert that a line is replaced, removed or added."""
    old, new = (
        (folder / name).read_text().splitlines() for name in ("sick.py", "well.py")
    )
    marks = Counter(line[0] for line in difflib.ndiff(old, new) if line[0] in "-+")
    assert set(marks.values()) == {1}, f"the twins differ by {dict(marks)}"


def row(name: str, which: str, out: dict[str, Any], seconds: float) -> str:
    first, last = (
        value if isinstance(value, str) else f"{value:.3g}"
        for value in (out["first_loss"], out["last_loss"])
    )
    return (
        f"{name:20} {which:5} {first:>9} {last:>9} {out['scale']:>9.3g} "
        f"{out['taken']:>5} {out['skipped']:>7} {seconds:>5.1f}"
    )


def verify(name: str, case: dict[str, Any]) -> float:
    """Check one case and return the CPU seconds that it took."""
    folder = HERE / name
    well, total = run(folder / "well.py")
    if "cause" not in case:
        assert case.keys() == {"looks"}, f"keys {sorted(case)}"
        print(row(name, "well", well, total), flush=True)
        check_healthy(well)
        return total
    keys = {"fault", "cause", "place", "since", "shows"}
    assert case.keys() - {"also"} == keys, f"keys {sorted(case)}"
    unknown = {case["cause"], *case.get("also", [])} - CAUSES
    assert not unknown, f"causes {sorted(unknown)} are unknown"
    sick, seconds = run(folder / "sick.py")
    print(row(name, "sick", sick, seconds))
    print(row(name, "well", well, total), flush=True)
    check_repair(folder)
    check_healthy(well)
    check_sick(case["shows"], sick, well)
    return total + seconds


def main(names: list[str]) -> int:
    cases = tomllib.loads((HERE / "cases.toml").read_text())
    folders = {script.parent.name for script in HERE.glob("*/well.py")}
    assert cases.keys() == folders, f"not both: {sorted(cases.keys() ^ folders)}"
    causes = Counter(case["cause"] for case in cases.values() if "cause" in case)
    assert max(causes.values()) <= 4, f"too often: {causes.most_common(3)}"

    print(f"{'case':26} {'first':>9} {'last':>9} {'scale':>9} taken skipped   CPU")
    # Sums differ with the number of threads.
    torch.set_num_threads(1)
    total, failed = 0.0, {}
    for name in names or cases:
        try:
            total += verify(name, cases[name])
        except AssertionError as error:
            failed[name] = error
    print(f"{total:.0f} s of CPU")
    for name, error in failed.items():
        print(f"{name}: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
