"""`import apex` finds gradscale's, whatever package of that name is installed."""

import importlib
import sys

import pytest

import gradscale.apex
import gradscale.apex.amp._amp_state
from gradscale.apex import amp_C, install_as_apex


@pytest.fixture
def unrelated(tmp_path, monkeypatch):
    """Put a package of the same name first on the path."""
    folder = tmp_path / "apex"
    folder.mkdir()
    (folder / "__init__.py").write_text("import a_web_framework")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def as_apex(unrelated):
    undo = install_as_apex()
    yield
    undo()


PATHS = [
    "apex",
    "apex.amp",
    "apex.amp._amp_state",
    "apex.amp._initialize",
    "apex.amp._process_optimizer",
    "apex.amp.amp",
    "apex.amp.frontend",
    "apex.amp.handle",
    "apex.amp.lists.torch_overrides",
    "apex.amp.scaler",
    "apex.fp16_utils",
    "apex.fp16_utils.fp16_optimizer",
    "apex.fp16_utils.loss_scaler",
    "apex.multi_tensor_apply",
    "apex.optimizers",
    "apex.parallel",
    "apex.parallel.LARC",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_apex_is_the_module_of_gradscale(as_apex, path):
    module = importlib.import_module(path)
    assert module is sys.modules[f"gradscale.{path}"]
    assert module.__spec__.name == f"gradscale.{path}"


def test_names_are_imported_from_packages(as_apex):
    from apex import amp
    from apex.amp import _amp_state
    from apex.parallel import LARC

    assert amp is gradscale.apex.amp
    # The object and not the module of the same name, as in apex.
    assert _amp_state is gradscale.apex.amp._amp_state
    assert _amp_state.loss_scalers == []
    assert LARC is gradscale.apex.parallel.LARC


def test_the_compiled_extension_is_found_too(as_apex):
    assert importlib.import_module("amp_C") is amp_C


@pytest.mark.parametrize("path", ["apex.contrib", "apex.amp.missing"])
def test_what_is_not_there_is_missing(as_apex, path):
    with pytest.raises(ModuleNotFoundError, match=path):
        importlib.import_module(path)


def test_it_can_be_undone(unrelated):
    undo = install_as_apex()
    importlib.import_module("apex.amp")
    undo()
    with pytest.raises(ModuleNotFoundError, match="a_web_framework"):
        importlib.import_module("apex")
    assert gradscale.apex.amp.__spec__.name == "gradscale.apex.amp"


def test_a_package_that_was_imported_before_comes_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", sys)
    undo = install_as_apex()
    assert importlib.import_module("apex") is gradscale.apex
    undo()
    assert sys.modules["apex"] is sys
