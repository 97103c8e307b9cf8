"""Every known pattern in a tiny model, and its twin with the safe form."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradscale.judge.unsafe_ops import PATTERNS
from gradscale.torch.locate.diagnose import diagnose


class Tiny(nn.Module):
    """A weight of 1, and a function of its product with the input."""

    def __init__(self, function, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight)


class Case(NamedTuple):
    """A sick function, its healthy twin, and the values both are given."""

    name: str
    sick: object
    healthy: object
    values: list
    dtype: torch.dtype = torch.float16


SCORES = [[0.0, 20.0]]


def masked(x, value):
    return torch.softmax(x.masked_fill(x >= value, float("-inf")), -1)


CASES = [
    Case(
        "masked_row",
        lambda x: masked(x, 0.0),
        lambda x: masked(x, 1.0),
        SCORES,
    ),
    Case(
        "log_of_softmax",
        lambda x: functional.softmax(x, -1).log(),
        lambda x: functional.log_softmax(x, -1),
        SCORES,
    ),
    Case(
        "log_of_sigmoid",
        lambda x: torch.sigmoid(x).log(),
        lambda x: functional.logsigmoid(x),
        [-30.0],
    ),
    Case(
        "rounds_to_one",
        lambda x: torch.atanh(x.clamp(-1 + 1e-6, 1 - 1e-6)),
        lambda x: torch.atanh(x.float().clamp(-1 + 1e-6, 1 - 1e-6)),
        [1.0],
    ),
    Case(
        "rounds_to_one",
        lambda x: torch.log(1 - x.clamp(1e-6, 1 - 1e-6)),
        lambda x: torch.log(1 - x.float().clamp(1e-6, 1 - 1e-6)),
        [1.0],
    ),
    Case(
        "log_with_tiny_eps",
        lambda x: torch.log(x + 1e-8),
        lambda x: torch.log(x.float() + 1e-3),
        [0.0, 1.0],
    ),
    Case(
        "log_at_zero",
        lambda x: torch.log(x),
        lambda x: torch.log(x.float().clamp(min=1e-7)),
        [0.0, 1.0],
    ),
    Case(
        "division_with_tiny_eps",
        lambda x: 1.0 / (x + 1e-8),
        lambda x: 1.0 / (x.float() + 1e-3),
        [0.0, 1.0],
    ),
    Case(
        "division_with_tiny_eps",
        lambda x: functional.normalize(x, dim=-1),
        lambda x: functional.normalize(x.float(), dim=-1, eps=1e-3),
        [[0.0, 0.0]],
    ),
    Case(
        "norm_at_zero",
        lambda x: x / x.norm(),
        lambda x: x / (x.norm() + 1e-3),
        [0.0, 0.0],
    ),
    Case(
        "large_mask",
        lambda x: x - 65504.0 - 40.0,
        lambda x: x - 1e4 - 40.0,
        [-100.0],
    ),
    Case(
        "large_mask",
        lambda x: x + x.new_ones(1) * -1e9,
        lambda x: x + x.new_ones(1) * -1e4,
        [1.0],
    ),
    Case(
        "half_norm",
        lambda x: (x * x).sum().sqrt(),
        lambda x: (x.float() * x.float()).sum().sqrt(),
        [200.0] * 2,
    ),
    Case(
        "half_norm",
        lambda x: x.var(),
        lambda x: x.float().var(),
        [300.0, -300.0],
    ),
    Case(
        "sqrt_at_zero",
        lambda x: torch.sqrt(x),
        lambda x: torch.sqrt(x + 1e-3),
        [0.0, 1.0],
    ),
    Case(
        "sqrt_at_zero",
        lambda x: x**0.5,
        lambda x: (x + 1e-3) ** 0.5,
        [0.0, 1.0],
    ),
    Case(
        "negative_base",
        lambda x: x**1.5,
        lambda x: x.clamp(min=0.0) ** 1.5,
        [-1.0, 1.0],
    ),
    Case(
        "arc_at_one",
        lambda x: torch.acos(x),
        lambda x: torch.acos(x.float().clamp(-1 + 1e-6, 1 - 1e-6)),
        [1.0],
    ),
    Case(
        "bce_on_probabilities",
        lambda x: functional.binary_cross_entropy(torch.sigmoid(x), x * 0),
        lambda x: functional.binary_cross_entropy_with_logits(x, x * 0),
        [20.0],
    ),
    Case(
        "division_by_zero",
        lambda x: 1.0 / x,
        lambda x: 1.0 / x.float().clamp(min=1e-3),
        [0.0, 1.0],
    ),
    Case(
        "power_overflow",
        lambda x: x**2,
        lambda x: x.float() ** 2,
        [300.0],
    ),
    Case(
        "power_overflow",
        lambda x: x * x,
        lambda x: x.float() * x.float(),
        [300.0],
    ),
    Case(
        "exp_overflow",
        lambda x: torch.exp(x),
        lambda x: torch.exp(x - x.max()),
        [12.0],
    ),
    Case(
        "exp_overflow",
        lambda x: torch.exp(x),
        lambda x: torch.logsumexp(x, 0),
        [90.0],
        torch.float32,
    ),
    Case(
        "half_sum",
        lambda x: x.sum(),
        lambda x: x.sum(dtype=torch.float32),
        [3e4] * 4,
    ),
    Case(
        "half_sum",
        lambda x: x.cumsum(0),
        lambda x: x.cumsum(0, dtype=torch.float32),
        [3e4] * 4,
    ),
    Case(
        "half_sum",
        lambda x: x.cumprod(0),
        lambda x: x.float().cumprod(0),
        [300.0] * 2,
    ),
    Case(
        "half_product",
        lambda x: x @ x.mT,
        lambda x: (x / 16.0) @ (x / 16.0).mT,
        [[300.0, 300.0]],
    ),
    Case(
        "cast_overflow",
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        [1e5],
        torch.float32,
    ),
]
IDS = [f"{case.name}-{number}" for number, case in enumerate(CASES)]


def diagnosed(case, function):
    model = Tiny(function, case.dtype)
    x = torch.tensor(case.values, dtype=case.dtype)
    return diagnose(model, lambda: model(x).float().sum() * 2.0**-10, 1.0)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_sick_form_is_recognised(case):
    found = diagnosed(case, case.sick)
    assert found.pattern is not None, found.text()
    assert found.pattern.name == case.name
    assert found.pattern.instead in found.text()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_safe_form_is_finite(case):
    assert not diagnosed(case, case.healthy).found


def test_every_pattern_has_a_case():
    assert {case.name for case in CASES} == {pattern.name for _, pattern in PATTERNS}


def test_an_overflow_without_a_known_pattern_has_none():
    case = Case("", lambda x: x * 300.0 * 300.0, None, [1.0])
    found = diagnosed(case, case.sick)
    assert found.found
    assert found.pattern is None
