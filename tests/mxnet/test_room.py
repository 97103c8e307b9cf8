"""The room exports what it names, and its examples run."""

import doctest
import importlib
import pkgutil

import pytest

import gradscale.mxnet
from tests.pages import DOCS, run_page

MODULES = [
    "",
    *(f".{each.name}" for each in pkgutil.iter_modules(gradscale.mxnet.__path__)),
]
WITH_EXAMPLES = ("", ".amp", ".gluon_nlp", ".gradients", ".recorder", ".scaler")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    done = doctest.testmod(importlib.import_module(f"gradscale.mxnet{name}"))
    assert done.failed == 0
    assert done.attempted > 0 or name not in WITH_EXAMPLES


def test_the_examples_of_the_page_run():
    done = run_page(DOCS / "mxnet.md")
    assert done.failed == 0
    assert done.attempted > 10


@pytest.mark.parametrize("module", [gradscale.mxnet, gradscale.mxnet.amp])
def test_an_exported_name_exists(module):
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
