"""All commands count skips in the same way."""

import json

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.cli.run import Recorded, closing_lines
from gradscale.diagnosis import diagnose_run
from gradscale.diagnosis.following import Follower
from gradscale.report.tail_screen import vitals
from gradscale.runfile import RunWriter, open_run

# Steps with a non-finite loss: some applied, some skipped.
LOSSES = [(step % 4 > 0, "GS203") for step in range(20)]
# Steps without gradients, and one skip.
IDLE = [*[(False, "GS103")] * 9, (False, "GS201"), *[(False, "GS103")] * 9]


def call(*arguments):
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
    assert counts in closing_lines(Recorded([str(path)], 1, 1, ""))
    assert counts in call("doctor", path).stdout
    assert counts in call("report", path).stdout
    assert json.loads(call("report", path, "--json").stdout)["skipped"] == skipped
    both = json.loads(call("diff", path, path, "--json").stdout)
    assert (both["a"]["skipped"], both["b"]["skipped"]) == (skipped, skipped)
    assert vitals(follower)["skipped"].startswith(f"{skipped}, ")
