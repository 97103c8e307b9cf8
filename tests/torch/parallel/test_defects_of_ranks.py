"""What torch's scalers get wrong on two ranks, and ours right."""

import re

import pytest

from tests.torch.parallel.defect_cases import DEFECTS, PASSED
from tests.torch.parallel.launch import all_saw, seen_by


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defects")
    return seen_by("tests.torch.parallel.defect_cases", 2, folder)


@pytest.mark.parametrize("name", DEFECTS)
def test_torch_fails(seen, name):
    first, second = all_saw(seen, f"{name}-torch")
    assert re.search(DEFECTS[name].words, first)
    assert re.search(DEFECTS[name].words, second)


@pytest.mark.parametrize("name", DEFECTS)
def test_gradscale_passes(seen, name):
    assert all_saw(seen, f"{name}-ours") == [PASSED, PASSED]
