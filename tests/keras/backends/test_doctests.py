"""The examples in the docstrings of the room and on its page run."""

import doctest
import importlib
import pkgutil

import pytest

import gradscale.keras
from tests.keras.backends.steps import BACKEND
from tests.pages import DOCS, run_page

# Those that compute with TensorFlow itself.
TENSORFLOW = ("loss_scale", "replicas", "tape", "tf")
MODULES = [
    name
    for _, name, _ in pkgutil.iter_modules(gradscale.keras.__path__)
    if BACKEND == "tensorflow" or name not in TENSORFLOW
]
WITH_EXAMPLES = ("compilation", "monitor", "optimizer", "settings", "tape", "tf")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    done = doctest.testmod(importlib.import_module(f"gradscale.keras.{name}"))
    assert done.failed == 0
    assert done.attempted > 0 or name not in WITH_EXAMPLES


def test_the_examples_of_the_package_run():
    assert doctest.testmod(gradscale.keras).failed == 0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the page has TensorFlow in it")
def test_the_examples_of_the_page_run():
    done = run_page(DOCS / "keras.md")
    assert done.failed == 0
    assert done.attempted > 10
