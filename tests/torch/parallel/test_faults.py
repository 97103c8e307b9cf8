"""One rank of two is unlucky: all decide alike, nobody waits, and guards agree."""

import pytest

from tests.torch.parallel.fault_cases import OPTIMIZERS, WAYS
from tests.torch.parallel.launch import all_saw, seen_by

SPEAKING = [way for way in WAYS if way != "bare-ddp"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return seen_by("tests.torch.parallel.fault_cases", 2, folder)


def decisions(steps):
    """Return of each step what all ranks must have in common."""
    return [tuple(step[:4]) for step in steps]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [("overflows", "overflow"), ("nan-data", "forward_nonfinite")],
)
def test_what_befalls_one_rank_is_a_skip_on_all(seen, fault, verdict, make):
    (first, skipped), (second, skipped_too) = all_saw(seen, f"{fault}-{make}")
    assert decisions(first) == decisions(second)
    assert [step[:3] for step in first] == [
        [True, 8.0, "ok"],
        [False, 4.0, verdict],
        [True, 4.0, "ok"],
    ]
    assert [step[4] for step in first] == [step[4] for step in second]
    assert [step[4] for step in first] == [False, True, False]
    assert skipped == skipped_too == 1


@pytest.mark.parametrize(
    "case",
    [f"{fault}-{make}" for fault in ("has-fewer", "has-none") for make in OPTIMIZERS]
    + ["is-slow-sgd"],
)
def test_what_is_no_overflow_is_a_step_on_all_ranks(seen, case):
    (first, skipped), (second, skipped_too) = all_saw(seen, case)
    assert decisions(first) == decisions(second)
    assert [step[:3] for step in first] == [[True, 8.0, "ok"]] * 3
    assert skipped == skipped_too == 0
    # Rank 1 has nothing to step on; rank 0 steps.
    assert [step[4] for step in first] == [False] * 3
    assert second[1][4] is ("has-none" in case)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_collapse_is_raised_in_the_same_call_on_all_ranks(seen, make):
    first, second = all_saw(seen, f"collapse-{make}")
    assert first == second == {"count": 5, "code": "GS202", "untouched": True}


@pytest.mark.parametrize("way", SPEAKING)
def test_a_bad_loss_on_one_rank_holds_the_scale_on_all(seen, way):
    first, second = all_saw(seen, f"bad-loss-{way}-raise")
    assert first == second
    assert [scale for _, scale in first] == [8, 8, 16, 16, 16, 16, 32]
    assert [applied for applied, _ in first] == [1, 0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("case", [*(f"{way}-report" for way in WAYS), "bare-ddp-raise"])
def test_a_bad_loss_is_else_an_overflow_on_all_ranks(seen, case):
    first, second = all_saw(seen, f"bad-loss-{case}")
    assert first == second
    assert [scale for _, scale in first] == [8, 4, 4, 2, 1, 1, 2]
    assert [applied for applied, _ in first] == [1, 0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_the_others_did_not_hear_of_holds_nobody(seen, way):
    assert all_saw(seen, f"loss-after-the-reading-{way}") == [[16, 32, 64]] * 2


@pytest.mark.parametrize("guard", ["raise", "report"])
@pytest.mark.parametrize("way", ["fsdp2", "group", "sharded-scaler"])
def test_spread_gradients_take_one_exchange_a_step(seen, way, guard):
    assert all_saw(seen, f"exchanges-{way}-{guard}") == [[1, 1, 1]] * 2


def test_under_ddp_losses_take_one_exchange_a_step_if_they_are_to_hold(seen):
    assert all_saw(seen, "exchanges-ddp-raise") == [[1, 1, 1]] * 2


def test_under_ddp_ranks_else_compare_their_places_once(seen):
    assert all_saw(seen, "exchanges-ddp-report") == [[1, 0, 0]] * 2


@pytest.mark.parametrize("guard", ["raise", "report"])
def test_under_ddp_of_which_the_scaler_knows_nothing_there_is_no_exchange(seen, guard):
    assert all_saw(seen, f"exchanges-bare-ddp-{guard}") == [[0, 0, 0]] * 2


def test_a_nan_of_any_dtype_is_seen_where_there_is_no_such_gradient(seen):
    assert all_saw(seen, "nan-among-four-dtypes") == [[[False, 4.0]] * 3] * 2


def test_norms_of_two_ranks_are_added_by_their_order(seen):
    for norms, amax in all_saw(seen, "norms-of-two-ranks"):
        assert norms == [5.0, 7.0, 4.0]
        assert amax == 32.0


def test_gradients_that_need_f64_are_judged_as_f64(seen):
    assert all_saw(seen, "large-f64-gradients") == [[True, 8.0]] * 2


def test_the_norm_under_ddp_is_that_of_one_copy(seen):
    for alone, together in all_saw(seen, "norm-under-ddp"):
        assert together == pytest.approx(alone, rel=1e-6)
