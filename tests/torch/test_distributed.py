"""Two real processes: ranks that are given a group decide together."""

import pytest

from tests.torch.parallel.launch import all_saw, seen_by
from tests.torch.ranks import MAKES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run every case in two processes; return what the two ranks saw of each."""
    return seen_by("tests.torch.ranks", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("unscale", ["ready", "unscaled"])
@pytest.mark.parametrize("word", ["inf", "nan"])
def test_a_bad_gradient_on_one_rank_is_a_skip_on_both(ranks, make, unscale, word):
    first, second = all_saw(ranks, f"{word}-on-rank-1-{make}-{unscale}")
    assert first == second
    assert first["applied"] is False
    assert first["verdict"] == "calibrating"
    assert first["scale"] == 4.0
    assert first["weights"] == [0.0, 0.0]


@pytest.mark.parametrize("make", MAKES)
def test_finite_gradients_are_a_step_on_both(ranks, make):
    first, second = all_saw(ranks, f"finite-{make}")
    assert first["applied"]
    assert second["applied"]
    assert first["scale"] == second["scale"] == 8.0
    # The largest magnitude on any rank: 2 on rank 1, times the scale.
    assert first["amax"] == second["amax"] == 16.0


@pytest.mark.parametrize("make", MAKES)
def test_a_rank_without_gradients_keeps_nobody_waiting(ranks, make):
    first, second = all_saw(ranks, f"no-gradients-on-rank-0-{make}")
    assert first["weights"] == [0.0, 0.0]
    assert second["weights"][0] < 0.0
    assert first["scale"] == second["scale"] == 8.0


@pytest.mark.parametrize("make", MAKES)
def test_a_rank_without_gradients_backs_off_with_the_other(ranks, make):
    first, second = all_saw(ranks, f"no-gradients-on-rank-0-inf-on-rank-1-{make}")
    assert first["scale"] == second["scale"] == 4.0
    assert first["applied"] is second["applied"] is False


@pytest.mark.parametrize("clip", ["early", "optimizer", "parameters"])
@pytest.mark.parametrize("unscale", ["ready", "unscaled"])
def test_a_norm_that_overflows_on_one_rank_is_a_skip_on_both(ranks, clip, unscale):
    first, second = all_saw(ranks, f"norm-overflow-on-rank-1-{clip}-{unscale}")
    assert first["applied"] is second["applied"] is False
    assert first["verdict"] == second["verdict"] == "norm_overflow"
    assert first["scale"] == second["scale"] == 0.5
    assert first["weights"] == second["weights"] == [0.0] * 4


@pytest.mark.parametrize("clip", ["early", "optimizer", "parameters"])
@pytest.mark.parametrize("unscale", ["ready", "unscaled"])
def test_a_clip_waits_for_no_rank_without_gradients(ranks, clip, unscale):
    first, second = all_saw(ranks, f"clip-without-gradients-on-rank-0-{clip}-{unscale}")
    assert first["scale"] == second["scale"] == 8.0
    assert second["weights"] == [-0.25, -0.25]


@pytest.mark.parametrize(("guard", "scale"), [("report", 4.0), ("raise", 8.0)])
def test_a_bad_loss_on_one_rank_is_known_to_both(ranks, guard, scale):
    first, second = all_saw(ranks, f"bad-loss-on-rank-1-{guard}")
    assert first["verdict"] == second["verdict"] == "forward_nonfinite"
    assert first["scale"] == second["scale"] == scale


def test_without_a_group_each_rank_decides_for_itself(ranks):
    first, second = all_saw(ranks, "no-group")
    assert (first["applied"], second["applied"]) == (True, False)


def test_a_collapse_is_raised_in_the_same_call_on_both(ranks):
    first, second = all_saw(ranks, "collapse")
    assert first == second == {"count": 5, "code": "GS202", "weights": [1.0, 1.0]}


def test_scales_weights_and_checkpoints_stay_equal_over_a_run(ranks):
    first, second = all_saw(ranks, "a-run")
    assert first == second
    assert first["scales"] == [8, 16, 16, 8, 8, 4, 4, 2, 2, 4, 4, 8]


def test_under_ddp_gradients_arrive_reduced_and_no_group_is_needed(ranks):
    first, second = all_saw(ranks, "ddp-without-group")
    assert first == second
    assert first["finite"]
    assert [applied for applied, _ in first["facts"]] == [True, False, True]
    assert [scale for _, scale in first["facts"]] == [8.0, 4.0, 4.0]


def test_a_scaler_with_a_group_says_that_it_cannot_be_pickled(ranks):
    first, _ = all_saw(ranks, "pickling")
    assert "process_group" in first["error"]
    assert "state_dict()" in first["error"]
