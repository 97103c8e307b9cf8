"""Runs the scripts of the zoo under `gradscale run`, and scores `gradscale doctor`.

`cases.toml` of each half lists the scripts: a folder with `sick.py` and its repaired
twin `well.py`, or with a healthy `well.py` alone. Scripts import torch alone, and run
unmodified.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
HALVES = ("open", "kept")
# Seconds until a script counts as stuck.
PATIENCE = 180
# Sums differ with the number of threads.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# Words of a finding's location for those of `cases.toml`.
PLACES = {
    "the batch": "batch",
    "the loss": "loss",
    "the optimizer": "optimizer",
    "the training loop": "optimizer",
    "the weights": "weights",
}


class Script(NamedTuple):
    """One script of the zoo.

    Attributes:
        half: "open" or "kept".
        name: Of its folder.
        sick: It is to be found sick.
        cause: The cause that is to be named; empty for a healthy one.
        places: The locations that count as right; none if there is no location.
        since: The update at which the trouble begins.
        runs: How often the script is run; the last run is judged.
        also: Other causes that its author accepts.
    """

    half: str
    name: str
    sick: bool
    cause: str = ""
    places: tuple[str, ...] = ()
    since: int = 1
    runs: int = 1
    also: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The script's file."""
        return HERE / self.half / self.name / ("sick.py" if self.sick else "well.py")

    def __str__(self) -> str:
        return f"{self.half}/{self.name}/{self.path.name}"


class Result(NamedTuple):
    """The diagnosis of one script.

    Attributes:
        script: The script.
        ended: Its exit code.
        verdict: Of the whole run.
        findings: As `gradscale doctor --json` prints them, the most severe first.
        record: The run file.
    """

    script: Script
    ended: int
    verdict: str
    findings: Sequence[dict[str, Any]]
    record: Path

    @property
    def first(self) -> dict[str, Any]:
        """The first finding; empty if there is none."""
        return self.findings[0] if self.findings else {}

    @property
    def right_cause(self) -> bool:
        """Whether the first finding names the cause, or a healthy run has none."""
        cause = self.first.get("cause", "")
        return cause == self.script.cause or cause in self.script.also

    @property
    def right_place(self) -> bool | None:
        """Whether the first finding names the location; None if there is none."""
        if not self.script.places:
            return None
        where = PLACES.get(self.first.get("where", ""), self.first.get("where", ""))
        return any(
            f"{where}.".startswith(f"{place}.") or (place == "weights" and "." in where)
            for place in self.script.places
        )


def scripts_of(half: str) -> list[Script]:
    """Return the scripts of a half, in the order of `cases.toml`; none without it.

    The half `kept` is absent once it was scored and its scripts have joined `open`.
    """
    listed = HERE / half / "cases.toml"
    cases = tomllib.loads(listed.read_text()) if listed.exists() else {}
    found = []
    for name, case in cases.items():
        runs = case.get("runs", 1)
        if "cause" in case:
            places, also = tuple(case["place"]), tuple(case.get("also", ()))
            facts = case["cause"], places, case["since"], runs, also
            found.append(Script(half, name, True, *facts))
        if (HERE / half / name / "well.py").exists():
            found.append(Script(half, name, False, runs=runs))
    return found


@contextmanager
def launcher(folder: Path) -> Iterator[Any]:
    """Yield a function that runs scripts by run file, and returns their exit codes.

    All run below one `gradscale run`, in forks of one process that has imported torch.
    """
    command = ["-m", "gradscale", "run", "-o", folder / "all.gs", HERE / "launcher.py"]
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def run(scripts: dict[Path, Path]) -> list[int]:
        jobs = [[str(script), str(record)] for record, script in scripts.items()]
        late = threading.Timer(PATIENCE, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        try:
            print(json.dumps(jobs), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())
        finally:
            late.cancel()

    try:
        yield run
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def judged(scripts: Sequence[Script], folder: Path, at_once: int) -> Iterator[Result]:
    """Run scripts, some at a time, and yield their diagnoses.

    Args:
        scripts: In any order.
        folder: For the run files; each script runs in a folder of its own.
        at_once: Scripts that run at the same time.
    """
    with launcher(folder) as run:
        for start in range(0, len(scripts), at_once):
            batch = scripts[start : start + at_once]
            homes = [
                folder / script.half / f"{script.name}-{script.path.stem}"
                for script in batch
            ]
            for home in homes:
                home.mkdir(parents=True)
            ended: dict[Path, int] = {}
            for number in range(max(script.runs for script in batch)):
                due = {
                    home / f"{number}.gs": script.path
                    for home, script in zip(homes, batch, strict=True)
                    if number < script.runs
                }
                ended |= zip(due, run(due), strict=True)
            for script, home in zip(batch, homes, strict=True):
                record = home / f"{script.runs - 1}.gs"
                yield result_of(script, record, ended[record])


def result_of(script: Script, record: Path, ended: int) -> Result:
    """Return what `gradscale doctor` says of a run file."""
    from gradscale.diagnosis import diagnose_run
    from gradscale.runfile import open_run

    if not record.exists():
        return Result(script, ended, "nothing recorded", [], record)
    with open_run(record) as run:
        found = diagnose_run(run)
    findings = [finding.as_dict() for finding in found.serious]
    return Result(script, ended, str(found.health), findings, record)
