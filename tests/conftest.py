"""Hypothesis: the same examples in every run, others on request.

`HYPOTHESIS_PROFILE=explore make test` draws new examples, and more of them.
"""

import gc
import os

from hypothesis import settings

# Also of the processes that tests start: workers already use all cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Modules of the Keras room are imported by some tests; TensorFlow is slow to load.
os.environ.setdefault("KERAS_BACKEND", "jax")
# Nor does each of them compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_collection_finish() -> None:
    """Exempt what imports and collection have made from garbage collection.

    That is about a million objects. Each full collection visits them, and so does each
    search for the model of an optimizer: 0.2 s per overflow in a test.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undo it: the interpreter collects at its end, and nanobind reports what stays."""
    gc.unfreeze()
