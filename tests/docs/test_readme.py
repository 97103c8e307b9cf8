"""README says what pyproject.toml says."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
EXTRAS = PROJECT["optional-dependencies"]


def section(title):
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def bounds(extra, library):
    """Return the versions of a library that an extra allows, as (first, beyond)."""
    (line,) = [line for line in EXTRAS[extra] if line.startswith(f"{library}>=")]
    return re.fullmatch(rf"{library}>=([\d.]+),<([\d.]+)", line).groups()


def test_every_extra_is_in_the_table_of_the_install_section():
    rows = re.findall(r"^\| `(\w+)` \|", section("Install"), re.M)
    assert rows == list(EXTRAS)


@pytest.mark.parametrize(
    ("extra", "library", "name"), [("torch", "torch", "PyTorch"), ("jax", "jax", "JAX")]
)
def test_the_versions_of_a_framework_are_those_of_its_extra(extra, library, name):
    lowest, beyond = bounds(extra, library)
    major, minor = beyond.split(".")
    row = f"| {name} {lowest} to {major}.{int(minor) - 1}"
    assert row in section("Install")


def test_the_version_of_python_is_the_one_that_is_required():
    required = PROJECT["requires-python"].removeprefix(">=")
    named = set(re.findall(r"Python (\d\.\d+)", README))
    assert named == {required}
    listed = [c for c in PROJECT["classifiers"] if re.search(r":: 3\.\d", c)]
    tested = re.search(r"\| Python (.*?) \|", section("Supported"))[1].split(" and ")
    assert [f"Programming Language :: Python :: {v}" for v in tested] == listed
