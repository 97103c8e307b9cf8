"""What the tests of this folder share."""

import fcntl
import os

import pytest

from tests.torch.parallel.launch import seen_by, written_in

CASES = "tests.torch.parallel.small_cases"


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Return what four ranks saw of the cases that take no time.

    They run once, also where several workers share the tests.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "small"
    with (shared / "small.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return written_in(folder, CASES, 4)
        own = tmp_path_factory.mktemp("running")
        seen = seen_by(CASES, 4, own)
        own.rename(folder)
        return seen
