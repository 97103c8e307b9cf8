"""Random training programs end as under torch's own scaler."""

import pytest

from tests.torch.random_programs import difference


@pytest.mark.parametrize("tens", range(6))
def test_random_programs_do_what_they_do_under_torch(tens):
    seeds = range(10 * tens, 10 * tens + 10)
    assert {seed: text for seed in seeds if (text := difference(seed))} == {}
