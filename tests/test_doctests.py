"""Every example in a docstring and in the pages under docs/ runs."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import gradscale
from tests.pages import DOCS, FencedParser, run_page

MODULES = [
    "gradscale",
    *(
        name
        for _, name, _ in pkgutil.walk_packages(gradscale.__path__, "gradscale.")
        # Importing it runs the command line.
        if name != "gradscale.__main__"
        # In processes of their own, one for each backend: tests/keras.
        and not name.startswith("gradscale.keras")
        # In an environment of its own: tests/mxnet.
        and not name.startswith("gradscale.mxnet")
    ),
]
# Modules whose docstrings teach by example must not lose them.
WITH_EXAMPLES = [
    "gradscale",
    "gradscale.apex.amp.amp",
    "gradscale.apex.amp.frontend",
    "gradscale.apex.amp.handle",
    "gradscale.apex.amp.scaler",
    "gradscale.apex.as_apex",
    "gradscale.apex.fp16_utils.fp16_optimizer",
    "gradscale.core.checkpoint",
    "gradscale.core.foreign_checkpoint",
    "gradscale.core.foreign_rules",
    "gradscale.core.state",
    "gradscale.core.outcome",
    "gradscale.judge.findings",
    "gradscale.judge.judge",
    "gradscale.judge.unsafe_ops",
    "gradscale.core.policies",
    "gradscale.core.records",
    "gradscale.jax",
    "gradscale.jax.accumulation",
    "gradscale.jax.retry",
    "gradscale.jax.state",
    "gradscale.jax.culprits",
    "gradscale.jax.differentiation",
    "gradscale.jax.flax",
    "gradscale.jax.jmp",
    "gradscale.jax.optimizer",
    "gradscale.jax.precision",
    "gradscale.jax.reading",
    "gradscale.jax.recorder",
    "gradscale.jax.scaling",
    "gradscale.runfile",
    "gradscale.runfile.creation",
    "gradscale.runfile.reader",
    "gradscale.runfile.rows",
    "gradscale.runfile.thinning",
    "gradscale.runfile.writer",
    "gradscale.torch.locate.forward_hooks",
    "gradscale.torch.locate.module_hooks",
    "gradscale.torch.locate.result",
    "gradscale.torch.locate.diagnose",
    "gradscale.torch.optim.adam",
    "gradscale.torch.optim.lion",
    "gradscale.torch.optim.sgd",
    "gradscale.torch.initialization",
    "gradscale.torch.precision.casting",
    "gradscale.torch.precision.float16_params",
    "gradscale.torch.precision.levels",
    "gradscale.torch.precision.master_weights",
    "gradscale.torch.quantization",
    "gradscale.torch.underflow.meter",
    "gradscale.recording.recorder",
    "gradscale.recording.recorded_run",
    "gradscale.torch.monitor.model_lookup",
    "gradscale.torch.scaler",
    "gradscale.torch.sharded",
    "gradscale.torch.attach.watch",
    "gradscale.torch.monitor.evidence",
]


# That of Keras needs a backend: tests/keras. That of MXNet is run by tests/mxnet.
PAGES = sorted(set(DOCS.glob("*.md")) - {DOCS / "keras.md", DOCS / "mxnet.md"})


@pytest.fixture(autouse=True)
def same_numbers():
    """Start each example from one seed, whatever ran before it."""
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_a_module_that_is_used_first_has_examples(name):
    # They are run above.
    assert name in MODULES
    found = doctest.DocTestFinder().find(importlib.import_module(name))
    assert any(docstring.examples for docstring in found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_examples_of_a_page_run(path):
    assert run_page(path).failed == 0


def test_the_page_of_policies_has_examples():
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert len(FencedParser().get_examples(text)) > 10


def test_a_wrong_example_is_found(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("```python\n>>> 1 + 1\n3\n```\n", encoding="utf-8")
    assert run_page(page).failed == 1


def test_a_fence_is_not_expected_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\n>>> 1 + 1\n2\n```\n", encoding="utf-8")
    assert run_page(page).failed == 0
