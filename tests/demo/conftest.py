"""Fixtures of the demo's tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    # As in the demo: results do not depend on the machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
