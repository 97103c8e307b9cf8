"""`import apex` finds gradscale's, whatever package of that name is installed."""

import importlib
import sys

import pytest
import torch

import gradscale.apex
import gradscale.apex.amp._amp_state
from gradscale.apex import amp_C, apex_C, install_as_apex


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
    "apex.normalization",
    "apex.normalization.fused_layer_norm",
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


@pytest.mark.parametrize("extension", [amp_C, apex_C])
def test_the_compiled_extensions_are_found_too(as_apex, extension):
    name = extension.__name__.removeprefix("gradscale.apex.")
    assert importlib.import_module(name) is extension


@pytest.mark.parametrize("path", ["apex.contrib", "apex.amp.missing"])
def test_what_is_not_there_is_missing(as_apex, path):
    with pytest.raises(ModuleNotFoundError, match=path):
        importlib.import_module(path)


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from apex import mlp", r"provide apex\.mlp.*Linear"),
        ("from apex.mlp import MLP", r"provide apex\.mlp.*Linear"),
        ("import apex.contrib.xentropy", r"provide apex\.contrib.*torch\.nn"),
        ("from apex.RNN import LSTM", r"torch\.nn\.LSTM"),
        ("import apex.parallel.multiproc", "torchrun"),
        ("from apex import other", r"docs/apex\.md"),
    ],
)
def test_the_error_for_a_missing_module_names_an_alternative(
    as_apex, statement, advice
):
    with pytest.raises(ModuleNotFoundError, match=advice):
        exec(statement)


def test_the_norms_are_those_of_torch(as_apex):
    from apex.normalization import FusedLayerNorm, FusedRMSNorm

    x = torch.randn(3, 4)
    expected = torch.nn.LayerNorm(4, eps=1e-3)(x)
    assert torch.equal(FusedLayerNorm(4, eps=1e-3)(x), expected)
    expected = torch.nn.RMSNorm(4, eps=1e-5)(x)
    assert torch.equal(FusedRMSNorm([4], elementwise_affine=False)(x), expected)


@pytest.mark.parametrize("kind", ["MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_a_mixed_norm_returns_the_dtype_of_its_weight(as_apex, kind):
    norm = getattr(importlib.import_module("apex.normalization"), kind)(4)
    assert norm(torch.ones(2, 4).half()).dtype is torch.float32
    assert norm.half()(torch.ones(2, 4)).dtype is torch.float16


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
