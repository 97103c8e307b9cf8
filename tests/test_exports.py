"""What the package offers: complete, sorted, documented."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gradscale

SOURCE = Path(gradscale.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PACKAGES = [
    name
    for _, name, is_package in pkgutil.walk_packages(gradscale.__path__, "gradscale.")
    # Needs an environment of its own: tests/mxnet/test_room.py.
    if is_package and name != "gradscale.mxnet"
]


def place(path):
    return str(path.relative_to(SOURCE))


def test_all_names_that_the_package_imports_are_exported():
    public = {
        name
        for name, value in vars(gradscale).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(gradscale.__all__) == public


@pytest.mark.parametrize("name", gradscale.__all__)
def test_an_exported_name_has_a_docstring_of_its_own(name):
    value = getattr(gradscale, name)
    kind = value if inspect.isclass(value) or callable(value) else type(value)
    assert kind.__module__.startswith("gradscale.")
    # A dataclass without a docstring gets its signature for one.
    assert not (kind.__doc__ or "").startswith(f"{kind.__name__}(")
    assert kind.__doc__


@pytest.mark.parametrize("package", PACKAGES)
def test_an_exported_name_of_a_room_exists(package):
    module = importlib.import_module(package)
    assert [n for n in getattr(module, "__all__", []) if not hasattr(module, n)] == []


def test_exports_are_sorted():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "RUF022", str(SOURCE)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def undocumented(tree):
    """Return the public classes and functions of a module that say nothing."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        node.name
        for node in tree.body
        if isinstance(node, kinds) and not node.name.startswith("_")
        if ast.get_docstring(node) is None
    ]


def test_a_missing_docstring_is_found():
    assert undocumented(ast.parse("def public(): ...")) == ["public"]


@pytest.mark.parametrize("path", FILES, ids=place)
def test_a_file_and_its_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert undocumented(tree) == []
