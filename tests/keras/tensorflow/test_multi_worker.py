"""MultiWorkerMirroredStrategy: two processes, one decision."""

import json
import subprocess
import sys
from pathlib import Path

from gradscale.runfile import open_run

SCRIPT = Path(__file__).with_name("two_workers.py")


def test_nan_on_one_worker_skips_on_all(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)
    )
    # The gradients of the workers are added.
    weight = [0.0, 1.0]
    expected = [[weight, 8.0], [weight, 4.0], [weight, 2.0]]
    assert first["steps"] == second["steps"] == expected
    assert first["culprits"] == second["culprits"] == ["w"]
    # The first worker writes the run file.
    assert (first["writes"], second["writes"]) == (True, False)
    with open_run(tmp_path / "run.gs") as run:
        assert [row.applied for row in run.steps()] == [True, False, False]
    # The page says so: Keras itself cannot, with any optimizer.
    assert "PerReplica" in first["error of fit"]
