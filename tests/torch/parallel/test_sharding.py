"""Which ranks decide together and how often each element is held, by the meshes."""

import pytest

from tests.torch.parallel.launch import all_saw

ALL = [0, 1, 2, 3]
# For each case the ranks that decide together and the copies of each parameter: what
# all ranks see.
SAME_ON_ALL = {
    "ordinary": "alone",
    "ordinary-given": [ALL, [None, None]],
    "one-axis": [ALL, [1, 4, 4]],
    "two-axes": [ALL, [4, 2, 2, 1, 1, 4]],
    "without-names": [ALL, [4, 2, 2, 1, 1, 4]],
    "two-axes-apart": [ALL, [2, 2, 4, 4]],
    "axis-of-one": [ALL, [1, 4, 4]],
    "pipeline": [ALL, [1, 2, 2]],
    "pipeline-inside": [ALL, [1, 2, 2]],
    "flattened": [ALL, [1, 4, 2]],
    "flattened-in-a-pipeline": [ALL, [1, 2, 2]],
    "unflattened": [ALL, [1, 2, 2]],
    "in-another-order": [ALL, [1, 2, 2]],
    "equal-meshes": [ALL, [1, 4, 4]],
    "two-roots": [ALL, [1, 2, 4]],
    "half-of-the-world-in-two-axes-given": [ALL, [1, 2, 2]],
    "given-all-of-a-line": [ALL, [1, 4, 4]],
    "fsdp1": [[ALL, [None]], [ALL, [None, None]]],
}


@pytest.mark.parametrize("name", SAME_ON_ALL)
def test_the_ranks_and_the_copies_follow_from_the_mesh(small, name):
    assert all_saw(small, name) == [SAME_ON_ALL[name]] * 4


def test_ranks_of_a_line_that_is_not_the_world_decide_among_themselves(small):
    first, second = [[0, 1], [1, 2, 2]], [[2, 3], [1, 2, 2]]
    assert all_saw(small, "half-of-the-world") == [first, first, second, second]


def test_a_given_group_counts_the_copies_inside_it(small):
    # Its ranks differ along the first axis alone.
    copies = [2, 1, 2, 1, 1, 2]
    seen = all_saw(small, "given-one-axis")
    assert seen == [[ranks, copies] for ranks in ([0, 2], [1, 3], [0, 2], [1, 3])]


def test_a_rank_outside_the_given_group_is_told_so(small):
    seen = all_saw(small, "given-without-some-ranks")
    assert seen[0] == seen[2] == [[0, 2], [None]]
    assert seen[1]["code"] == "GS111"
    assert "does not contain rank 1." in seen[1]["text"]


@pytest.mark.parametrize(
    "name", ["half-of-the-world-in-two-axes", "two-meshes-of-which-one-is-half"]
)
def test_meshes_without_one_group_are_refused_with_the_way_out(small, name):
    for seen in all_saw(small, name):
        assert seen["code"] == "GS111"
        assert "DeviceMesh" in seen["text"]
        assert "process_group=" in seen["text"]
