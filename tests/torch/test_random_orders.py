"""No order of calls takes a step with a wrong scale and says nothing."""

import pytest

from tests.torch.random_orders import difference_from_torch, wrong_step


@pytest.mark.parametrize("hundred", range(2))
def test_no_order_of_calls_goes_wrong_silently(hundred):
    seeds = range(100 * hundred, 100 * hundred + 100)
    assert {seed: text for seed in seeds if (text := wrong_step(seed))} == {}


@pytest.mark.parametrize("forty", range(2))
def test_no_order_of_calls_is_refused_or_moves_the_scale_unlike_in_torch(forty):
    seeds = range(40 * forty, 40 * forty + 40)
    assert {s: text for s in seeds if (text := difference_from_torch(s))} == {}
