"""Steps with overflows are the same in parallel as in one process."""

import pytest

from tests.torch.parallel.launch import all_saw, seen_by
from tests.torch.parallel.parity_cases import ON_FOUR, ON_TWO, alone, bad_rows

# Weights of about 1 after some steps in f32, whose sums are taken in another
# order: a few units in the last place.
CLOSE = 2e-6

pytestmark = pytest.mark.parametrize(
    ("spread", "optimizer", "clip"), [*ON_TWO, *ON_FOUR]
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(f"parity-{ranks}") for ranks in (2, 4)]
    return seen_by("tests.torch.parallel.parity_cases", 2, folders[0]) | seen_by(
        "tests.torch.parallel.parity_mesh_cases", 4, folders[1]
    )


def test_scales_and_skips_are_those_of_one_process(seen, spread, optimizer, clip):
    expected = alone(optimizer, clip)
    assert expected["applied"] == [row is None for row in bad_rows()]
    assert len(set(expected["scales"])) > 5
    for one in all_saw(seen, f"{spread}-{optimizer}-{clip}"):
        assert one["applied"] == expected["applied"]
        assert one["scales"] == expected["scales"]


def test_weights_are_those_of_one_process(seen, spread, optimizer, clip):
    expected = alone(optimizer, clip)["weights"]
    for one in all_saw(seen, f"{spread}-{optimizer}-{clip}"):
        for mine, other in zip(one["weights"], expected, strict=True):
            assert mine == pytest.approx(other, abs=CLOSE)
