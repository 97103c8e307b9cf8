"""Cases of `test_resume` on two ranks: runs that other processes have stopped."""

from tests.torch.parallel.launch import Cases
from tests.torch.parallel.resume_runs import FROM_FOUR, FROM_TWO, resumed_from

CASES = Cases()

for _ranks, _names in ((4, FROM_FOUR), (2, FROM_TWO)):
    for _name in _names:
        CASES.case(f"from-{_ranks}-{_name}")(resumed_from(_name, _ranks))
