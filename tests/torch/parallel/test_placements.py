"""However gradients lie across four ranks, all of them skip or all of them step."""

import pytest

from tests.torch.parallel.launch import all_saw, seen_by
from tests.torch.parallel.placement_cases import DRAWS, IN_STAGES, OPTIMIZERS, SCALE

# f32 sums of squares.
CLOSE = {"rel": 1e-6}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placements")
    return seen_by("tests.torch.parallel.placement_cases", 4, folder)


@pytest.mark.parametrize("draw", range(DRAWS))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bad_element_on_any_one_rank_is_a_skip_on_all(seen, optimizer, draw):
    for draws in all_saw(seen, f"{optimizer}-bad"):
        one = draws[draw]
        assert one["applied"] is False
        assert one["scale"] == SCALE / 2
        assert not one["moved"]


@pytest.mark.parametrize("draw", range(DRAWS))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_finite_gradients_are_a_step_on_all(seen, optimizer, draw):
    for draws in all_saw(seen, f"{optimizer}-finite"):
        one = draws[draw]
        assert one["applied"] is True
        assert one["scale"] == SCALE * 2
        assert one["moved"] is one["has"]


# The odd draws are those with a clip.
@pytest.mark.parametrize("draw", range(1, DRAWS, 2))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_norm_is_that_of_the_whole(seen, optimizer, draw):
    for draws in all_saw(seen, f"{optimizer}-finite"):
        one = draws[draw]
        assert one["norm"] == pytest.approx(one["norm_of_whole"], **CLOSE)


def test_some_ranks_hold_nothing_at_all_in_some_draws(seen):
    by_draw = zip(*all_saw(seen, "sgd-finite"), strict=True)
    assert any(not all(one["has"] for one in ranks) for ranks in by_draw)


STAGES = ["stages-{}-{}", "cut-stages-{}-{}-False", "cut-stages-{}-{}-True"]


@pytest.mark.parametrize("bad_rank", [0, 3])
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("optimizer", IN_STAGES)
def test_a_bad_element_in_one_stage_is_a_skip_in_all(seen, optimizer, name, bad_rank):
    for one in all_saw(seen, name.format(optimizer, bad_rank)):
        assert one["applied"] is False
        assert one["scale"] == SCALE / 2
        assert not one["moved"]


@pytest.mark.parametrize("name", [*STAGES, "pairs-{}-{}"])
@pytest.mark.parametrize("optimizer", IN_STAGES)
def test_the_norm_of_stages_is_that_of_the_pipeline(seen, optimizer, name):
    for one in all_saw(seen, name.format(optimizer, None)):
        assert one["applied"] is True
        assert one["moved"]
        assert one["norm"] == pytest.approx(one["norm_of_whole"], **CLOSE)


@pytest.mark.parametrize(("bad_rank", "stopped"), [(0, [0, 2]), (3, [1, 3])])
@pytest.mark.parametrize("optimizer", IN_STAGES)
def test_a_group_of_two_decides_for_its_two_ranks(seen, optimizer, bad_rank, stopped):
    ranks = all_saw(seen, f"pairs-{optimizer}-{bad_rank}")
    for rank, one in enumerate(ranks):
        assert one["applied"] is (rank not in stopped)
        assert one["moved"] is (rank not in stopped)
        assert one["scale"] == (SCALE / 2 if rank in stopped else SCALE * 2)
