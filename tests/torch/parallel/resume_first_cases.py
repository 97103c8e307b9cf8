"""Cases of `test_resume` on two ranks, before all others."""

from tests.torch.parallel import dcp_cases
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.resume_runs import (
    FOLDER,
    FOLLOWING,
    FROM_TWO,
    KINDS,
    OFTEN,
    Run,
    trained,
    trained_and_resumed,
)

CASES = Cases(dcp_cases.CASES)


def _enter():
    for name in FROM_TWO:
        CASES.case(name)(lambda _, name=name: trained(name, KINDS[name]))
    for name, kind in OFTEN.items():
        CASES.case(name)(
            lambda _, name=name, kind=kind: trained_and_resumed(name, kind)
        )


@CASES.case("between-two-parts-of-a-batch")
def _(rank):
    # The step after it overflows.
    stop, kind = 3, KINDS["fsdp2-own"]
    run, path, seen = Run(kind), FOLDER / "between", []
    for step in range(stop + FOLLOWING):
        if step == stop:
            before = run.scaler.state_dict()
            run.optimizer.zero_grad()
            run.backward(step, part=0, parts=2)
            run.save(path)
            assert run.scaler.state_dict() == before
        seen.append(run.take(step, parts=2))
    again = Run(kind)
    again.load(path)
    steps = range(stop, stop + FOLLOWING)
    return {"run": seen[stop:], "again": [again.take(s, parts=2) for s in steps]}


_enter()
