"""Ranks that run out of data: afterwards all have the scale of the last one."""

import pytest

from tests.torch.parallel.launch import all_saw, seen_by


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("join")
    return seen_by("tests.torch.parallel.join_cases", 2, folder)


@pytest.mark.parametrize("make", ["plain", "model"])
@pytest.mark.parametrize("guard", ["report", "raise"])
def test_all_end_with_the_state_of_the_last_one(seen, make, guard):
    first, second = all_saw(seen, f"joined-{make}-{guard}")
    assert first == second
    assert [(one["scale"], one["tracker"]) for one in first] == [(8.0, 0), (8.0, 0)]
    # Seven batches on rank 0, then four on rank 1; three overflows.
    assert [one["counts"] for one in first] == [[5, 2], [8, 3]]


def test_without_the_scaler_in_it_the_states_differ(seen):
    first, second = all_saw(seen, "not-joined")
    assert first[0]["weights"] == second[0]["weights"]
    assert first[0]["scale"] != second[0]["scale"]
    assert first[0]["counts"] != second[0]["counts"]


def test_a_rank_without_any_data_takes_over_the_state_too(seen):
    first, second = all_saw(seen, "no-data-at-all")
    assert first == second
    assert (first["scale"], first["tracker"], first["counts"]) == (16.0, 1, [3, 0])


def test_losses_are_told_again_once_all_have_joined(seen):
    assert all_saw(seen, "after-join") == [[32.0, 32.0]] * 2


def test_a_scaler_whose_ranks_speak_in_every_step_is_refused(seen):
    for told in all_saw(seen, "deciding-together"):
        assert [code for code, _ in told] == ["GS111", "GS111"]
        assert "leave process_group out" in told[0][1]
        assert "ShardedGradScaler" in told[1][1]


def test_a_disabled_scaler_joins_without_a_word(seen):
    assert all_saw(seen, "disabled") == [1.0, 1.0]
