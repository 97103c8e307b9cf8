"""Two real processes: retries, windows and several losses are decided together."""

import pytest

from tests.torch.parallel.launch import all_saw, seen_by


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return seen_by("tests.torch.loops.rank_cases", 2, tmp_path_factory.mktemp("ranks"))


def test_both_ranks_run_a_batch_again_if_one_overflows(ranks):
    first, second = all_saw(ranks, "retry")
    assert first["counts"] == second["counts"] == [1, 1, 4, 1]
    assert first["weights"] == second["weights"]
    assert first["scale"] == second["scale"] == 2.0**5


def test_a_bad_loss_on_one_rank_is_tried_again_on_none(ranks):
    first, second = all_saw(ranks, "bad-loss-on-one-rank")
    assert first == second == {"tries": 1, "applied": False}


def test_both_ranks_learn_of_an_overflow_inside_a_window(ranks):
    first, second = all_saw(ranks, "window-without-sync")
    assert first["seen"] == second["seen"] == [True, False]


def test_the_scale_of_a_loss_is_the_same_on_all_ranks(ranks):
    first, second = all_saw(ranks, "losses-of-a-group")
    assert first == second
    assert tuple(first["scales"]) == (8.0, 4.0)
    assert first["weights"] == [0.0, 0.0]
