"""What the count of collectives stands on, and where it must not be saved."""

import pytest

from tests.torch.parallel.collective_cases import EXCHANGE
from tests.torch.parallel.launch import all_saw


def test_the_counter_sees_plain_and_functional_collectives_and_those_of_dtensors(small):
    for calls in all_saw(small, "the-counter-counts"):
        assert calls.pop("c10d.allreduce_") == 1
        assert calls.pop(EXCHANGE) == 1
        # What distributes and gathers a DTensor.
        assert calls
        assert sum(calls.values()) == 2


def test_ranks_without_elements_or_gradients_ask_as_often_as_the_others(small):
    # 3 + 2 elements of 1 on rank 0, 2 on rank 1, 3 on rank 2.
    for calls, norm in all_saw(small, "empty-and-missing-on-some-ranks"):
        assert calls == {EXCHANGE: 1}
        assert norm == pytest.approx(10**0.5, rel=1e-6)


def test_a_gradient_that_is_refused_on_one_rank_leaves_no_rank_waiting(small):
    assert all_saw(small, "refused-on-rank-1") == ["GS111", "GS106", "GS111", "GS111"]


def test_a_dtensor_that_was_written_to_is_read_again(small):
    for before, after in all_saw(small, "a-write-in-between"):
        assert after == before / 2


def test_bare_parameters_are_read_whatever_was_done_to_them(small):
    for norm in all_saw(small, "a-write-without-a-trace"):
        # Torch's coefficient has 1e-6 beside the norm.
        assert norm == pytest.approx(0.125, rel=1e-5)
