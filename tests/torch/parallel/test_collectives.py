"""A step adds one collective where gradients are spread over ranks, and else none."""

import pytest

from tests.torch.parallel.collective_cases import EXCHANGE, FORMS, SPREADS
from tests.torch.parallel.launch import all_saw
from tests.torch.parallel.norm_cases import OPTIMIZERS

pytestmark = [
    pytest.mark.parametrize("form", FORMS),
    pytest.mark.parametrize("optimizer", OPTIMIZERS),
]


def test_ddp_costs_no_collective(small, optimizer, form):
    for iterations in all_saw(small, f"ddp-{optimizer}-{form}"):
        assert iterations == [[0, {}]] * 2


@pytest.mark.parametrize("spread", [name for name in SPREADS if name != "ddp"])
def test_spread_gradients_cost_one_collective(small, spread, optimizer, form):
    for iterations in all_saw(small, f"{spread}-{optimizer}-{form}"):
        for apart, calls in iterations:
            # Sums that are still apart would be put together without a scaler too.
            sums = {"_c10d_functional.all_reduce": apart} if apart else {}
            assert calls == {EXCHANGE: 1, **sums}
