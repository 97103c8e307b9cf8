"""The Python of README and of the pages under docs/ passes mypy --strict."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Those of `make lint`, so that both share one cache, and for the pages mypy --strict.
# Functions of a page need no annotations; all calls of gradscale are checked.
SETTINGS = (
    (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    + """
[[tool.mypy.overrides]]
module = ["pages.*"]
check_untyped_defs = true
disallow_any_generics = true
disallow_subclassing_any = true
extra_checks = true
strict_bytes = true
strict_equality = true
warn_return_any = true
warn_unused_ignores = true
allow_redefinition = true

[[tool.mypy.overrides]]
# Without type information, or not installed.
module = ["orbax.*", "wandb.*"]
ignore_missing_imports = true
"""
)
# What the pages assume to exist.
GIVEN = {
    "torch": """\
from typing import Any
import torch
from torch.nn.parallel import DistributedDataParallel
from gradscale import DynamicScale, StaticScale
from gradscale.torch import GradScaler
model: Any = torch.nn.Linear(4, 1)
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters())
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
progress: Any = None
train: Any = None
batch = torch.ones(8, 4)
batches = [batch]
scaler = GradScaler("cuda", model=model)
def loss_of(*given: Any) -> torch.Tensor:
    raise NotImplementedError
""",
    "jax": """\
from functools import partial
from typing import Any
import jax
import optax
params: dict[str, jax.Array] = {}
batch = jax.numpy.ones(4)
def loss_of(*given: Any) -> jax.Array:
    raise NotImplementedError
""",
    "keras": """\
from typing import Any
import keras
model: Any = None
x: Any = None
y: Any = None
""",
    "mxnet": """\
from typing import Any
import mxnet
net: Any = None
trainer: Any = None
batch: Any = None
batch_size = 4
def loss_of(*given: Any) -> Any:
    raise NotImplementedError
""",
}
# A number as device, which is the mistake that the example shows; and a scaler for
# Join, which wants a subclass of torch's Joinable and calls nothing but its methods.
REFUSED = {"codes_GS107_1", "ranks_Uneven_1"}


def blocks(page):
    """Return {name: source}: the plain blocks of a page, and its doctests as one."""
    text = page.read_text(encoding="utf-8")
    heading, found, session, number = "", {}, [], 0
    for match in re.finditer(r"^## (\w+)|^```python\n(.*?)^```", text, re.S | re.M):
        if match[1]:
            heading, number = match[1], 0
            continue
        if ">>>" in match[2]:
            session += [
                e.source for e in doctest.DocTestParser().get_examples(match[2])
            ]
            continue
        number += 1
        framework = "jax" if "optax" in match[2] else "torch"
        framework = "keras" if "keras" in match[2] else framework
        framework = "mxnet" if "mxnet" in match[2] else framework
        found[f"{page.stem}_{heading}_{number}"] = GIVEN[framework] + match[2]
    if session:
        found[f"{page.stem}_session"] = "".join(session)
    return found


def errors_of(sources, folder):
    """Return {name: [messages]} of those sources that mypy refuses."""
    pages = folder / "pages"
    pages.mkdir()
    for name, source in sources.items():
        (pages / f"{name}.py").write_text(source, encoding="utf-8")
    settings = folder / "pyproject.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(settings), str(pages)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(folder)},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = {}
    for line in done.stdout.splitlines():
        match = re.match(r".*pages/(\w+)\.py:\d+: error: (.*)", line)
        if match:
            errors.setdefault(match[1], []).append(match[2])
    return errors


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    sources = {name: text for page in PAGES for name, text in blocks(page).items()}
    sources["wrong"] = GIVEN["torch"] + "scaler.last.applied\nscaler.scale(3)\n"
    return errors_of(sources, tmp_path_factory.mktemp("pages"))


def test_a_wrong_example_is_found(errors):
    absent, unknown = errors["wrong"]
    assert 'has no attribute "applied"' in absent
    assert "No overload variant" in unknown


def test_every_example_is_accepted_except_two_that_are_known(errors):
    assert errors.keys() - {"wrong"} == REFUSED, errors
