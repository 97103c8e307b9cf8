"""Cases of `test_parity` that take four ranks."""

from tests.torch.parallel.launch import Cases
from tests.torch.parallel.parity_cases import ON_FOUR, enter

CASES = Cases()
enter(CASES, ON_FOUR)
