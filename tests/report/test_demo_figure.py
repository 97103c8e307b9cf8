"""The figure of the demo: its layers, and the PNG."""

import importlib
import math
import struct
import sys
from typing import NamedTuple

import pytest

from gradscale.report.demo_figure import comparison_figure
from gradscale.report.figure_theme import save_png


class Curve(NamedTuple):
    name: str
    losses: tuple
    scales: tuple = ()
    skipped: tuple = ()


STEPS = range(5)
EXACT = Curve("FP32", tuple((step, 4.0 - step / 2) for step in STEPS))
OTHER = Curve("FP32", tuple((step, 4.1 - step / 2) for step in STEPS))
SCALED = Curve(
    "FP16 dynamic",
    tuple((step, 4.0 - step / 2) for step in STEPS),
    scales=(1024.0, 2048.0, 1024.0, 1024.0),
    skipped=(1,),
)


def drawn(*runs, baseline=3.3):
    return comparison_figure(
        runs,
        [OTHER],
        baseline=baseline,
        title="What was found",
        subtitle="What was run",
    )


def layers(chart, panel):
    """Return the layers of one panel as (mark, rows)."""
    spec = chart.to_dict()
    return [
        (layer["mark"]["type"], layer["data"]["values"])
        for layer in spec["vconcat"][panel]["layer"]
    ]


def test_the_title_is_the_finding():
    title = drawn(EXACT, SCALED).to_dict()["title"]
    assert (title["text"], title["subtitle"]) == ("What was found", "What was run")


def test_the_loss_of_every_run_is_drawn_at_its_steps():
    rows = dict(layers(drawn(EXACT, SCALED), 0))["line"]
    assert [(row["step"], row["loss"]) for row in rows if row["run"] == "FP32"] == [
        *EXACT.losses
    ]
    assert {row["run"] for row in rows} == {"FP32", "FP16 dynamic"}


def test_a_loss_that_is_not_finite_is_left_out():
    broken = Curve("FP16 bare", ((0, 4.0), (1, math.nan), (2, math.inf)))
    rows = dict(layers(drawn(EXACT, SCALED, broken), 0))["line"]
    assert [row["loss"] for row in rows if row["run"] == "FP16 bare"] == [4.0]


def test_the_band_spans_the_seeds():
    band = dict(layers(drawn(EXACT, SCALED), 0))["area"]
    assert [(row["low"], row["high"]) for row in band] == [
        (4.0 - step / 2, 4.1 - step / 2) for step in STEPS
    ]


def test_the_baseline_is_drawn_as_a_rule():
    assert dict(layers(drawn(EXACT, SCALED), 0))["rule"] == [{"loss": 3.3}]


@pytest.mark.parametrize("baseline", [1.0, 3.3, 3.9])
def test_the_late_losses_and_the_baseline_are_inside_the_axis(baseline):
    panel = drawn(EXACT, SCALED, baseline=baseline).to_dict()["vconcat"][0]
    lines = next(x for x in panel["layer"] if x["mark"]["type"] == "line")
    low, high = lines["encoding"]["y"]["scale"]["domain"]
    assert low < min(2.0, baseline)
    assert high > max(3.0, baseline)


def test_the_fall_at_the_start_does_not_flatten_the_rest():
    start = Curve("FP32", ((0, 100.0), *EXACT.losses[1:]))
    panel = drawn(start, SCALED).to_dict()["vconcat"][0]
    lines = next(x for x in panel["layer"] if x["mark"]["type"] == "line")
    assert lines["encoding"]["y"]["scale"]["domain"][1] < 5.0
    assert lines["mark"]["clip"]


def test_the_scale_is_drawn_as_a_power_of_two():
    rows = dict(layers(drawn(EXACT, SCALED), 1))["line"]
    assert [row["log2"] for row in rows] == [10.0, 11.0, 10.0, 10.0]


def test_a_skipped_step_is_marked_at_the_scale_it_had():
    assert dict(layers(drawn(EXACT, SCALED), 1))["text"] == [{"step": 1, "log2": 11.0}]


def test_every_run_has_a_colour_of_its_own():
    names = ("FP32", "BF16", "FP16 bare", "FP16 static", "FP16 dynamic")
    runs = [SCALED._replace(name=name) for name in names]
    panel = drawn(*runs).to_dict()["vconcat"][0]
    lines = next(x for x in panel["layer"] if x["mark"]["type"] == "line")
    scale = lines["encoding"]["color"]["scale"]
    assert scale["domain"] == list(names)
    assert len(set(scale["range"])) == 5


def test_the_png_is_twice_as_wide_as_a_readme(tmp_path):
    path = tmp_path / "figure.png"
    save_png(drawn(EXACT, SCALED), path)
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG")
    assert 1600 <= width <= 1840
    assert 1000 <= height <= 1500


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_library_is_named_with_the_install_line(monkeypatch, library):
    monkeypatch.delitem(sys.modules, "gradscale.report.figure_theme")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=library) as caught:
        importlib.import_module("gradscale.report.figure_theme")
    assert "pip install 'gradscale[report]'" in str(caught.value)
