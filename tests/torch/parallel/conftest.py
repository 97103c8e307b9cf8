"""What the tests of this folder share."""

import pytest

from tests.torch.parallel.launch import seen_by


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Return what four ranks saw of the cases that take no time."""
    folder = tmp_path_factory.mktemp("small")
    return seen_by("tests.torch.parallel.small_cases", 4, folder)
