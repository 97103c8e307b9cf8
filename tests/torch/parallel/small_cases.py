"""The cases that take no time: together, they start their processes once."""

from tests.torch.parallel import collective_cases, piece_cases, sharding_cases
from tests.torch.parallel.launch import Cases

CASES = Cases(sharding_cases.CASES | collective_cases.CASES | piece_cases.CASES)
