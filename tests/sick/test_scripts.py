"""Sick training scripts and their healthy twins, which differ in one line.

A folder holds a pair: `sick.py` and `well.py`. They import torch alone. Each runs
unmodified below `gradscale run`, and `gradscale doctor` must find the cause.
`diff tests/sick/root_at_zero/*.py` shows the difference of a pair.
"""

import difflib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from tests.sick.cases import BLAMELESS, CASES

HERE = Path(__file__).parent
# Sums differ with the number of threads.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# Seconds until a pair of scripts counts as stuck.
PATIENCE = 120
ADVISES_A_LOWER_RATE = re.compile(r"lower (the )?learning rate")


class Judged(NamedTuple):
    """The output of `gradscale doctor --json` for a script.

    Attributes:
        verdict: Of the whole run.
        findings: The most severe first.
        exit_code: Of the command.
        ended: The exit code of the script.
    """

    verdict: str
    findings: list[dict[str, Any]]
    exit_code: int
    ended: int


# With the exit code of the script: one that fails at once has no finding either.
WELL = Judged("healthy", [], 0, 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs scripts at the same time and returns exit codes.

    It takes the scripts by run file. All run below one `gradscale run`.
    """
    record = tmp_path_factory.mktemp("launcher") / "run.gs"
    command = ["-m", "gradscale", "run", "-o", record, HERE / "launcher.py"]
    launcher = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )

    def run(scripts):
        jobs = [[str(script), str(record)] for record, script in scripts.items()]
        late = threading.Timer(PATIENCE, os.killpg, (launcher.pid, signal.SIGKILL))
        late.start()
        try:
            print(json.dumps(jobs), file=launcher.stdin, flush=True)
            return json.loads(launcher.stdout.readline())
        finally:
            late.cancel()

    yield run
    launcher.stdin.close()
    try:
        launcher.wait(timeout=PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()


@pytest.fixture(scope="module")
def judged(run, tmp_path_factory):
    """Return a function that runs a pair, both at the same time, and judges it."""

    @functools.cache
    def judge(name):
        folders = {twin: tmp_path_factory.mktemp(twin) for twin in ("sick", "well")}
        for number in range(CASES[name].runs):
            scripts = {
                folder / f"{number}.gs": HERE / name / f"{twin}.py"
                for twin, folder in folders.items()
            }
            ended = run(scripts)
        return dict(zip(folders, map(verdict_on, scripts, ended), strict=True))

    return judge


def verdict_on(record, ended):
    done = CliRunner().invoke(app, ["doctor", str(record), "--json"])
    output = json.loads(done.stdout)
    return Judged(output["verdict"], output["findings"], done.exit_code, ended)


@pytest.mark.parametrize("name", CASES)
def test_the_first_finding_on_a_sick_script_is_the_right_one(judged, name):
    case, (verdict, findings, exit_code, _) = CASES[name], judged(name)["sick"]
    assert [finding["code"] for finding in findings[:1]] == [case.code]
    assert (verdict, exit_code) == (case.verdict, 1 + (case.verdict == "collapse"))
    first = findings[0]
    if case.where is not None:
        assert f"{first['where']}.".startswith(f"{case.where}.")
    assert case.contains in json.dumps([first["evidence"], first["advice"]])
    if name in BLAMELESS:
        assert not ADVISES_A_LOWER_RATE.search(" ".join(first["advice"][:1]))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found_on_the_healthy_twin(judged, name):
    assert judged(name)["well"] == WELL


def test_a_scale_far_below_1_that_fits_is_no_collapse(run, tmp_path):
    record = tmp_path / "run.gs"
    [ended] = run({record: HERE / "raw_prices.py"})
    assert verdict_on(record, ended) == WELL


@pytest.mark.parametrize("name", CASES)
def test_twins_differ_in_one_line(name):
    sick, well = (
        (HERE / name / f"{twin}.py").read_text().splitlines()
        for twin in ("sick", "well")
    )
    marks = [line[0] for line in difflib.ndiff(sick, well) if line[0] in "+-"]
    assert sorted(marks) == ["+", "-"]


@pytest.mark.parametrize("name", CASES)
def test_scripts_do_not_mention_gradscale(name):
    for twin in ("sick", "well"):
        assert "gradscale" not in (HERE / name / f"{twin}.py").read_text()


def test_every_pair_is_judged():
    assert {path.parent.name for path in HERE.glob("*/sick.py")} == set(CASES)
    assert {path.parent.name for path in HERE.glob("*/well.py")} == set(CASES)
