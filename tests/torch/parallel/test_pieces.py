"""Own optimizers step a DTensor as they would step its pieces, bit for bit."""

import pytest

from tests.torch.parallel.launch import all_saw
from tests.torch.parallel.piece_cases import COMBINED, OPTIMIZERS, SPREADS

combined = pytest.mark.parametrize(("spread", "optimizer", "dtype"), COMBINED)


@combined
def test_a_dtensor_is_stepped_as_its_pieces_are(small, spread, optimizer, dtype):
    for seen in all_saw(small, f"pieces-{spread}-{optimizer}-{dtype}"):
        assert seen["applied"] == [[step != 2] * 2 for step in range(5)]
        assert all(seen["same"])
        assert seen["same_state"]
        assert all(seen["same_state"])


@combined
def test_the_state_of_a_dtensor_is_cut_as_it_is(small, spread, optimizer, dtype):
    for seen in all_saw(small, f"pieces-{spread}-{optimizer}-{dtype}"):
        assert set(seen["sharded_alike"].values()) == {True}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_that_was_saved_in_pieces_goes_on_bit_for_bit(small, spread, optimizer):
    for same in all_saw(small, f"saved-{spread}-{optimizer}"):
        assert same
        assert all(same)
