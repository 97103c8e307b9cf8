"""jmp's own tests, as they are installed with jmp, run on the drop-in.

Each run is a process of its own, in which two modules of jmp are replaced before jmp is
imported.
"""

import json
import os
import subprocess
import sys

import pytest

RUN = """
import importlib, json, sys, unittest

{swap}
names = ("jmp._src.loss_scale_test", "jmp._src.policy_test")
loaded = [importlib.import_module(name) for name in names]
load = unittest.defaultTestLoader.loadTestsFromModule
result = unittest.TextTestRunner(stream=sys.stderr).run(
    unittest.TestSuite(load(module) for module in loaded)
)
bad = [test for test, _ in result.failures + result.errors]
account = {{
    "under test": sorted(module.jmp.__name__ for module in loaded),
    "ran": result.testsRun,
    "skipped": len(result.skipped),
    "failed": sorted({{type(test).__module__ for test in bad}}),
}}
print(json.dumps(account))
"""
NO_SWAP = ""
SWAP = """
from gradscale.jax import jmp
sys.modules["jmp._src.loss_scale"] = sys.modules["jmp._src.policy"] = jmp
"""
# A scale that never moves, and parameters that are never cast.
BREAK = """
jmp.DynamicLossScale.adjust = lambda self, grads_finite: self
jmp.Policy.cast_to_param = lambda self, tree: tree
"""


def account(swap):
    """Return what became of jmp's tests after some lines have been run."""
    # On a GPU jmp's tests leave bfloat16 out.
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(swap=swap)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("swap", "under_test"),
    [
        (NO_SWAP, ["jmp._src.loss_scale", "jmp._src.policy"]),
        (SWAP, ["gradscale.jax.jmp", "gradscale.jax.jmp"]),
    ],
    ids=["jmp", "the drop-in"],
)
def test_all_of_jmps_own_tests_pass_on(swap, under_test):
    assert account(swap) == {
        "under test": under_test,
        "ran": 97,
        "skipped": 0,
        "failed": [],
    }


def test_a_drop_in_that_is_broken_fails_jmps_own_tests():
    told = account(SWAP + BREAK)
    assert told["ran"] == 97
    assert told["failed"] == ["jmp._src.loss_scale_test", "jmp._src.policy_test"]
