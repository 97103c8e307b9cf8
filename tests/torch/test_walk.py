"""How many calls and files one step takes: `benchmarks/bench_walk.py`."""

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from benchmarks import bench_walk
from benchmarks.bench_walk import CASES, row_of, trace

# Files and calls of one step, with a clip and `scaler.last`. Lower them whenever a
# change makes them smaller.
MOST = {"plain": (32, 157), "fused": (38, 195), "own": (42, 206)}


@pytest.fixture(scope="module")
def rows():
    """Return the row of each case; kernels run in Triton's interpreter."""
    if torch.cuda.is_available():
        return {row["impl"]: row for row in bench_walk.rows()}
    with pytest.MonkeyPatch.context() as patch:
        # Put back what the benchmark replaces.
        patch.setattr(GridExecutor, "__call__", GridExecutor.__call__)
        bench_walk._unprofiled_interpreter()
        return {name: row_of(name, trace(CASES[name])) for name in MOST}


@pytest.mark.parametrize("case", MOST)
def test_a_step_does_not_take_more_calls_than_it_did(rows, case):
    files, calls = MOST[case]
    assert rows[case]["files"] <= files
    assert rows[case]["calls"] <= calls
