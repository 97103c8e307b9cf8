"""Cases of `test_resume` on four ranks: runs that new objects go on with."""

from tests.torch.parallel.launch import Cases
from tests.torch.parallel.resume_runs import (
    FROM_TWO,
    KINDS,
    resumed_from,
    trained_and_resumed,
)

CASES = Cases()


def _enter():
    for name, kind in KINDS.items():
        CASES.case(name)(
            lambda _, name=name, kind=kind: trained_and_resumed(name, kind)
        )

    for name in FROM_TWO:
        CASES.case(f"from-2-{name}")(resumed_from(name, 2))


_enter()
