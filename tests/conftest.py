"""Hypothesis: the same examples in every run, others on request. Long files first.

`HYPOTHESIS_PROFILE=explore make test` draws new examples, and more of them.
"""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent

# Also of the processes that tests start: workers already use all cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Modules of the Keras room are imported by some tests; TensorFlow is slow to load.
os.environ.setdefault("KERAS_BACKEND", "jax")
# Less work for XLA's compiler, in JAX and TensorFlow: the programs are tiny.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)
# Nor does each of them compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


# Those that take longest, in CPU time. Workers take files in this order, so that none
# begins a long one when the others are done.
LONG_FILES = (
    "zoo/test_zoo.py",
    "examples/test_examples.py",
    "jax/test_transforms.py",
    "keras/test_tensorflow_backend.py",
    "keras/test_torch_backend.py",
    "keras/test_jax_backend.py",
    "torch/parallel/test_resume.py",
    "jax/test_devices.py",
    "torch/parallel/test_collectives.py",
    "test_doctests.py",
    "examples/test_jax_examples.py",
    "examples/test_keras_examples.py",
    "foreign/test_scripts.py",
    "jax/test_reading.py",
    "torch/kernels/test_pipeline.py",
    "jax/test_flax.py",
    "jax/test_recorder.py",
    "cli/test_odd_scripts.py",
    "core/test_conformance.py",
    "parity/test_plugin.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; the others keep their order."""
    places = {HERE / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> None:
    """Exempt what imports, collection and earlier files made from garbage collection.

    That is over a million objects. Each full collection visits them, and so does each
    search for the model of an optimizer: 0.2 to 0.5 s per overflow in a test.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undo it: the interpreter collects at its end, and nanobind reports what stays."""
    gc.unfreeze()
