"""Only in a process that `tests.keras.suite` has started for one backend."""

import os

import pytest

from tests.keras.suite import ENVIRONMENT

if ENVIRONMENT not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def fresh_keras():
    """Reset seeds and the dtype policy."""
    import keras

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session")
def strategy():
    """Return a MirroredStrategy over two virtual CPUs."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
