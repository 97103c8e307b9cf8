"""Keras' own tests of the class, as they are in its wheel, with ours in its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = "gradscale.keras.optimizer.LossScaleOptimizer"


def account(backend, *options):
    """Return the results of Keras' own tests on a backend."""
    done = subprocess.run(
        [sys.executable, "-m", "parity.keras_tests", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # One test has jit_compile=True, and compiles for 45 s.
            "TORCH_COMPILE_DISABLE": "1",
        },
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("backend", "passed", "skipped"), [("tensorflow", 29, 7), ("torch", 33, 3)]
)
def test_keras_own_tests_pass_with_our_class(backend, passed, skipped):
    assert account(backend) == {
        "backend": backend,
        "class": OURS,
        "passed": passed,
        "skipped": skipped,
        # A test that does not make it would show nothing.
        "tests that made it": passed,
        "names of failed tests": [],
    }


def test_they_pass_on_jax_with_the_8_stateful_ones_that_keras_skips():
    assert account("jax", "--lift") == {
        "backend": "jax",
        "class": OURS,
        "passed": 28 + 8,
        "tests that made it": 28 + 8,
        "names of failed tests": [],
    }


def test_those_8_fail_with_keras_own_class():
    lifted = account("jax", "--lift", "--baseline")
    assert (lifted["passed"], lifted["failed"]) == (28, 8)


def test_a_run_that_never_makes_our_class_is_told_apart():
    unbound = account("torch", "--unbound")
    assert (unbound["passed"], unbound["tests that made it"]) == (33, 0)
