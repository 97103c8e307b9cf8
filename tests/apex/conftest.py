"""Every test begins and ends without casts and with a fresh state of amp."""

import json
from pathlib import Path

import pytest
import torch

from gradscale.apex.amp import _amp_state
from gradscale.apex.amp._amp_state import AmpState

DATA = Path(__file__).parents[1] / "data"


def reset():
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    vars(_amp_state).clear()
    _amp_state.__init__()


@pytest.fixture(autouse=True)
def on_a_cpu(request, monkeypatch):
    """Test on the CPU everywhere; `test_cuda.py` tests on a GPU."""
    if request.path.name != "test_cuda.py":
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def fresh_amp():
    assert isinstance(_amp_state, AmpState)
    reset()
    torch.manual_seed(0)
    yield
    reset()
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture(scope="session")
def golden():
    return json.loads((DATA / "apex_golden.json").read_text(encoding="utf-8"))
