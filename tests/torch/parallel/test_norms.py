"""The norm of gradients that are spread over ranks is that of the whole."""

import pytest

from tests.torch.parallel.launch import all_saw, seen_by
from tests.torch.parallel.norm_cases import CASES


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return seen_by(
        "tests.torch.parallel.norm_cases", 4, tmp_path_factory.mktemp("norms")
    )


@pytest.mark.parametrize("name", CASES)
def test_a_clip_of_spread_gradients_is_that_of_one_process(seen, name):
    for alone, spread in all_saw(seen, name):
        assert spread["norm"] == pytest.approx(alone["norm"], rel=1e-6)
        assert spread["applied"]
        assert spread["weights"] == {
            key: pytest.approx(value, abs=1e-6)
            for key, value in alone["weights"].items()
        }
