"""Fixtures of all tests of the torch room."""

import os
from collections.abc import Iterator

import pytest
import torch

# Before any kernel is defined: Triton reads the variable when it decorates one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from gradscale.recording import recorded_run
from tests.torch.interpreter import patch_once


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sum in one order everywhere: results do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> Iterator[None]:
    """Spare Triton's interpreter work that changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr("triton.runtime.interpreter._patch_lang", patch_once)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device on which kernels run here; the CPU has Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    """Write bundles of runs that are stopped into a folder of the test."""
    monkeypatch.setattr(recorded_run, "BUNDLES", tmp_path)
