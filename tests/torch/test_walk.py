"""How many calls and files one step takes: `benchmarks/bench_walk.py`."""

import pytest
import torch

from benchmarks import bench_walk

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="counted on the CPU; Triton 3.6, of machines with a GPU, cannot interpret "
    "all kernels with NumPy 2.4",
)

# Files and calls of one step, with a clip and `scaler.last`. Lower them whenever a
# change makes them smaller.
MOST = {"plain": (32, 157), "fused": (38, 195), "own": (42, 206)}


@pytest.fixture(scope="module")
def rows():
    """Return the row of each case, traced in a process without hooks of other tests."""
    return {row["impl"]: row for row in bench_walk.rows()}


@pytest.mark.parametrize("case", MOST)
def test_a_step_does_not_take_more_calls_than_it_did(rows, case):
    files, calls = MOST[case]
    assert rows[case]["files"] <= files
    assert rows[case]["calls"] <= calls
