"""Cases of `test_resume` on four ranks: runs that new objects go on with."""

import torch.distributed as dist

from tests.torch.parallel.launch import Cases
from tests.torch.parallel.resume_runs import (
    FROM_TWO,
    KINDS,
    resumed,
    resumed_from,
    trained,
)

CASES = Cases()


def _enter():
    for name, kind in KINDS.items():

        @CASES.case(name)
        def _(rank, name=name, kind=kind):
            seen, ranks = trained(name, kind), dist.get_world_size()
            again = {stop: resumed(name, ranks, stop)["run"] for stop in kind.stops}
            return {**seen, "again": again}

    for name in FROM_TWO:
        CASES.case(f"from-2-{name}")(resumed_from(name, 2))


_enter()
