"""What every test of the torch room stands on."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradscale.torch.looks import building
from gradscale.torch.monitor import reporting


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sum in one order everywhere: results do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    """Write bundles of runs that are stopped into a folder of the test."""
    monkeypatch.setattr(reporting, "BUNDLES", tmp_path)


@pytest.fixture(scope="session")
def looks_in_cpp() -> Any:
    """Return the looks in C++; nobody uses them yet."""
    for tool in ("c++", "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: nothing can be built")
    before = building.native
    building.build()
    module, building.native = building.native, before
    return module


@pytest.fixture(params=["python", "cpp"])
def both_looks(request, monkeypatch) -> None:
    """Run a test with either kind of looks."""
    module = None
    if request.param == "cpp":
        module = request.getfixturevalue("looks_in_cpp")
    monkeypatch.setattr(building, "native", module)
