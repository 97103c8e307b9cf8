"""The examples for Keras and TensorFlow run and do what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

from gradscale.runfile import open_run

EXAMPLES = Path(__file__).parents[2] / "examples"


def figures(name, *arguments, backend="tensorflow"):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--json", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_fit_trains_and_records_on_jax(tmp_path):
    path = tmp_path / "run.gs"
    found = figures("keras_fit.py", "-o", str(path), backend="jax")
    assert found["loss"] < 0.6
    assert found["skipped"] >= 10
    with open_run(path) as run:
        assert len(list(run.steps())) == 400


# The same with one replica: the strategy then has one device.
def test_the_loop_of_tensorflow_skips_the_bad_step_on_both_replicas():
    found = figures("tensorflow_loop.py", "--replicas", "2")
    assert found["loss"][1] < 0.5 * found["loss"][0]
    assert found["culprits"] == 4
    assert found["applied"] + found["skipped"] == 200
