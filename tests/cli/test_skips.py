"""Skips are counted in one way, whoever counts them."""

import json

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.cli.run import Seen, closing_line
from gradscale.diagnosis import diagnose_run
from gradscale.diagnosis.following import Follower
from gradscale.report.tail_screen import vitals
from gradscale.runfile import RunWriter, open_run

# Steps that were taken though their loss was not finite, and skips.
LOSSES = [(step % 4 > 0, "GS203") for step in range(20)]
# Steps without gradients, and a skip among them.
IDLE = [*[(False, "GS103")] * 9, (False, "GS201"), *[(False, "GS103")] * 9]


def told(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "100"})


@pytest.mark.parametrize(
    ("steps", "skipped"), [(LOSSES, 5), (IDLE, 1)], ids=["losses", "idle"]
)
def test_all_commands_count_the_same_skips(tmp_path, steps, skipped):
    path = tmp_path / "run.gs"
    with RunWriter(path) as writer:
        for step, (applied, code) in enumerate(steps, start=1):
            writer.step(step, 1024.0, applied, code, loss=1.0)
    with open_run(path) as run:
        diagnosis, follower = diagnose_run(run), Follower(run)
        follower.poll()
    counts = f"{len(steps)} steps, {skipped} skipped"
    assert (diagnosis.skipped, follower.skipped) == (skipped, skipped)
    assert sum(phase.skipped for phase in diagnosis.phases) == skipped
    assert counts in closing_line(Seen([str(path)], 1, 1, ""))
    assert counts in told("doctor", path).stdout
    assert counts in told("report", path).stdout
    assert json.loads(told("report", path, "--json").stdout)["skipped"] == skipped
    both = json.loads(told("diff", path, path, "--json").stdout)
    assert (both["a"]["skipped"], both["b"]["skipped"]) == (skipped, skipped)
    assert vitals(follower)["skipped"].startswith(f"{skipped}, ")
