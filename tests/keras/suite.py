"""Runs the tests of one Keras backend in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Set in that process; without it, the tests of the backends are not collected.
ENVIRONMENT = "GRADSCALE_KERAS_TESTS"


def run_tests(backend, *folders):
    """Run the tests of some folders on a backend; return how many have passed.

    Keras chooses its backend when it is imported, and importing TensorFlow takes
    seconds: one process for all tests of a backend.
    """
    environment = {
        **os.environ,
        ENVIRONMENT: backend,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    for name in list(environment):
        # Of pytest-xdist and of this process.
        if name.startswith("PYTEST_"):
            del environment[name]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:randomly"]
        + [str(HERE / folder) for folder in folders],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    return int(passed[1])


def split_cpu():
    """Make two virtual CPUs of one; before TensorFlow is used."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, halves)
