"""The table of the demo."""

import math

import pytest
from rich.console import Console

from gradscale.core.formatting import power
from gradscale.report.demo_table import ComparisonRow, comparison_table
from gradscale.report.style import fixed_percent


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "0.0 %"), (0.0001, "<0.1 %"), (0.454, "45.4 %"), (1.0, "100.0 %")],
)
def test_a_non_zero_share_is_never_shown_as_zero(share, shown):
    assert fixed_percent(share) == shown


@pytest.mark.parametrize(
    ("scale", "shown"),
    [(65536.0, "2^16"), (1.0, "2^0"), (0.5, "2^-1"), (1000.0, "1000")],
)
def test_a_scale_is_shown_as_a_power_of_two_where_it_is_one(scale, shown):
    assert power(scale) == shown


def printed(distance, *, noise, colour=False, scale=None):
    row = ComparisonRow(
        name="FP16 bare",
        final_loss=3.07912,
        distance=distance,
        lost_share=0.454,
        skipped=4,
        scale=scale,
    )
    system = "standard" if colour else None
    console = Console(width=80, force_terminal=colour, color_system=system)
    with console.capture() as capture:
        console.print(comparison_table([row], noise=noise))
    return capture.get()


def test_a_row_shows_all_figures():
    line = printed(0.2963, noise=0.05, scale=4096.0).splitlines()[-2]
    assert line.split() == [
        *("FP16", "bare", "3.0791", "+0.2963", "45.4", "%", "4", "2^12"),
    ]


def test_missing_values_are_dashes():
    assert printed(None, noise=0.05).splitlines()[-2].split().count("–") == 2


@pytest.mark.parametrize("distance", [0.06, -0.06, math.nan])
def test_a_distance_beyond_the_noise_is_red(distance):
    assert "\x1b[1;31m" in printed(distance, noise=0.05, colour=True)


def test_a_distance_within_the_noise_is_green():
    shown = printed(-0.04, noise=0.05, colour=True)
    assert "\x1b[32m" in shown
    assert "\x1b[1;31m" not in shown
