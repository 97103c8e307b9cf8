"""Patterns are recognised from what is known of an operation, and from no more."""

import pytest

from gradscale.judge.unsafe_ops import Evidence, Range, recognise


def named(**changed):
    seen = Evidence("sqrt", "backward", "nan", "float16")._replace(**changed)
    pattern = recognise(seen)
    return None if pattern is None else pattern.name


def test_a_root_without_a_slope_is_known_though_its_input_is_not():
    assert named() == "sqrt_at_zero"
    assert named(operation="pow", constants=(0.5,)) == "sqrt_at_zero"


def test_a_root_at_0_has_no_slope():
    assert named(inputs=(Range(0.0, 3.0),)) == "sqrt_at_zero"


@pytest.mark.parametrize(
    "changed",
    [
        {"inputs": (Range(0.5, 3.0),)},
        {"direction": "forward"},
        {"operation": "mul"},
        {"operation": "pow", "constants": (2.0,)},
    ],
)
def test_what_is_no_root_at_0_is_not_called_one(changed):
    assert named(**changed) is None
