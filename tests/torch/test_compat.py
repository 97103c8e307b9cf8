"""The older signatures and the words that torch warns with."""

import warnings

import pytest
import torch

import gradscale.torch.cpu.amp
import gradscale.torch.cuda.amp
from gradscale import ConfigError, StaticScale
from gradscale.torch import GradScaler
from tests.torch.training import (
    INF,
    OlderProtocol,
    backward,
    parameter,
    scaled_once,
)

TORCH = torch.amp.GradScaler
SGD = torch.optim.SGD


def _said(action):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        action()
    return [(w.category, str(w.message), w.filename) for w in said]


@pytest.fixture
def _no_cuda(monkeypatch):
    monkeypatch.setattr(
        torch.cuda.amp.common, "amp_definitely_not_available", lambda: True
    )


@pytest.mark.usefixtures("_no_cuda")
@pytest.mark.parametrize("device", [(), ("cuda",)], ids=["default", "cuda"])
def test_missing_cuda_is_torchs_warning_at_the_callers_line(device):
    ours, theirs = _said(lambda: GradScaler(*device)), _said(lambda: TORCH(*device))
    assert ours == theirs
    assert ours[0][2] == __file__


@pytest.mark.usefixtures("_no_cuda")
def test_missing_cuda_disables():
    with pytest.warns(UserWarning, match="Disabling"):
        assert not GradScaler().is_enabled()


@pytest.mark.usefixtures("_no_cuda")
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_older_class_warns_as_torchs_does(kind):
    ours = getattr(gradscale.torch, kind).amp.GradScaler
    theirs = getattr(torch, kind).amp.GradScaler
    # Torch's second warning points into torch; ours, too, at the caller.
    assert [w[:2] for w in _said(ours)] == [w[:2] for w in _said(theirs)]
    assert {filename for _, _, filename in _said(lambda: ours())} == {__file__}


def test_the_older_protocol_warns_as_torchs_does():
    def run(kind):
        scaler, _, param = scaled_once(kind)
        scaler.step(OlderProtocol([param]))

    ours, theirs = _said(lambda: run(GradScaler)), _said(lambda: run(TORCH))
    assert ours == theirs
    assert ours[0][0] is FutureWarning


@pytest.mark.parametrize("number", [1024.0, 1024, True])
def test_a_number_as_device_is_an_error_that_names_both_spellings(number):
    with pytest.raises(ConfigError) as caught:
        GradScaler(number)
    assert f"gradscale.torch.GradScaler('cuda', init_scale={number})" in str(
        caught.value
    )
    assert f"gradscale.torch.cuda.amp.GradScaler({number})" in str(caught.value)


def test_the_older_class_takes_the_scale_first():
    with pytest.warns(FutureWarning, match=r"torch.cpu.amp.GradScaler\(args"):
        scaler = gradscale.torch.cpu.amp.GradScaler(1024.0, 4.0, 0.25, 7)
    assert scaler.get_scale() == 1024.0
    assert scaler.get_growth_factor() == 4.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7


def test_the_older_class_takes_the_new_keywords():
    with pytest.warns(FutureWarning):
        scaler = gradscale.torch.cpu.amp.GradScaler(policy=StaticScale(scale=8.0))
    assert scaler.get_scale() == 8.0


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
@pytest.mark.parametrize(
    ("grad", "moved", "scale"), [(1.0, -1.0, 8.0), (INF, 0.0, 4.0)]
)
def test_the_older_protocol_gets_the_scaler_itself(grad, moved, scale):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = OlderProtocol([param])
    backward(scaler, param, grad)
    assert scaler.step(optimizer) == "stepped"
    scaler.update()
    assert optimizer.scalers == [scaler]
    assert param.tolist() == [moved, moved]
    assert scaler.get_scale() == scale
