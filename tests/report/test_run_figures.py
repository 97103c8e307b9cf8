"""The figures of a run: the data of their layers."""

import math

import pytest

from gradscale.core.records import Verdict
from gradscale.diagnosis import diagnose_run
from gradscale.judge.verdict_table import codes_where
from gradscale.report.run_figures import PIECES, run_figure
from gradscale.report.style import VERDICT_STYLES
from gradscale.runfile import RunWriter, TensorSample, open_run
from tests.diagnosis import runs


def drawn(path):
    """Return the panels of a run's figure, each a list of (mark, rows)."""
    with open_run(path) as run:
        spec = run_figure(diagnose_run(run)).to_dict()
    panels = [
        [
            (layer["mark"]["type"], layer.get("data", panel.get("data"))["values"])
            for layer in panel["layer"]
        ]
        for panel in spec["vconcat"]
    ]
    return spec, panels


def rows(panel, mark):
    """Return the rows of all layers of a panel that have a mark."""
    return [row for kind, values in panel if kind == mark for row in values]


def test_the_line_is_the_scale_at_its_changes(tmp_path):
    runs.write(tmp_path / "run.gs", runs.saw_tooth(250))
    _, [panel] = drawn(tmp_path / "run.gs")
    line = [(row["step"], row["log2"]) for row in rows(panel, "line")]
    assert line == [(1, 15), (101, 16), (102, 15), (202, 16), (203, 15), (250, 15)]


def test_marks_have_step_scale_and_verdict(tmp_path):
    runs.write(tmp_path / "run.gs", runs.saw_tooth(250))
    _, [panel] = drawn(tmp_path / "run.gs")
    marks = [tuple(row.values()) for row in rows(panel, "point")]
    assert marks == [(101, 16.0, "probing"), (202, 16.0, "probing")]


def test_a_near_floor_is_drawn_and_a_far_ceiling_is_in_the_subtitle(tmp_path):
    runs.write(tmp_path / "run.gs", runs.collapse())
    spec, [panel, _] = drawn(tmp_path / "run.gs")
    assert rows(panel, "rule") == [{"log2": -24.0, "text": "floor 2^-24"}]
    assert "between 2^-24 and 2^126" in spec["title"]["subtitle"]


def test_a_far_floor_is_in_the_subtitle_and_not_drawn(tmp_path):
    runs.write(tmp_path / "run.gs", runs.saw_tooth(250))
    spec, [panel] = drawn(tmp_path / "run.gs")
    assert rows(panel, "rule") == []
    assert "between 2^-24 and 2^126" in spec["title"]["subtitle"]


def test_phases_that_are_not_steady_are_shaded(tmp_path):
    runs.write(tmp_path / "run.gs", runs.collapse())
    _, [panel, _] = drawn(tmp_path / "run.gs")
    shades = [(row["first"], row["last"]) for row in rows(panel, "rect")]
    assert shades == [(300, 341), (341, 401)]


def test_the_title_is_the_most_severe_finding(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_loss())
    spec, _ = drawn(tmp_path / "run.gs")
    assert spec["title"]["text"].startswith("GS203 the loss is NaN before scaling")


def test_a_long_run_with_many_changes_is_drawn_in_pieces(tmp_path):
    with RunWriter(tmp_path / "run.gs", backlog=1 << 20) as writer:
        for step in range(1, 10_001):
            writer.step(step, 2.0 ** (step % 2), True, "GS000")
    _, [panel] = drawn(tmp_path / "run.gs")
    assert len(rows(panel, "line")) == 2 * PIECES + 1


def test_each_piece_has_at_most_one_mark_of_a_verdict(tmp_path):
    with RunWriter(tmp_path / "run.gs", backlog=1 << 20) as writer:
        for step in range(1, 7801):
            writer.step(step, 4.0, False, Verdict.OVERFLOW.code)
    _, [panel] = drawn(tmp_path / "run.gs")
    kinds = [row["verdict"] for row in rows(panel, "point")]
    assert len(kinds) <= 3 * PIECES


def test_bars_are_shares_of_all_elements(tmp_path):
    runs.write_sampled(tmp_path / "run.gs", [1.0] * 200)
    _, [_, panel] = drawn(tmp_path / "run.gs")
    bars = [row for row in rows(panel, "rect") if "share" in row]
    assert len(bars) == 42
    assert sum(bar["share"] for bar in bars) == pytest.approx(1.0)
    kinds = [bar["range"] for bar in bars]
    assert (kinds.count("subnormal"), kinds.count("normal")) == (10, 30)


def test_the_ranges_of_float16_are_shaded(tmp_path):
    runs.write_sampled(tmp_path / "run.gs", [1.0] * 200)
    _, [_, panel] = drawn(tmp_path / "run.gs")
    bands = [(row["a"], row["b"]) for row in rows(panel, "rect") if "a" in row]
    assert bands == [(-24, -14), (-14, 16)]


@pytest.mark.parametrize(
    ("history", "title"),
    [
        (runs.saw_tooth, "Healthy: all skips are normal"),
        (lambda: list(runs.saw_tooth(50)), "Healthy: no steps skipped"),
    ],
)
def test_the_title_of_a_healthy_run_tells_whether_steps_were_skipped(
    tmp_path, history, title
):
    runs.write(tmp_path / "run.gs", history())
    spec, _ = drawn(tmp_path / "run.gs")
    assert spec["title"]["text"] == title


def test_a_run_without_a_step_has_a_figure(tmp_path):
    RunWriter(tmp_path / "run.gs").close()
    with open_run(tmp_path / "run.gs") as run:
        spec = run_figure(diagnose_run(run)).to_dict()
    [panel] = spec["vconcat"]
    assert panel["title"]["text"] == "The run has no steps yet"


def test_probably_flushed_zeros_have_their_own_bar_and_label(tmp_path):
    bins = [300, 200, 100, *[0] * 21, 1, *[0] * 15]
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1.0, True, "GS000", amax=1.0)
        writer.samples(1, {"w": TensorSample(901, 300, 600, bins)})
    spec, [_, panel] = drawn(tmp_path / "run.gs")
    zeros = [row for row in rows(panel, "rect") if row.get("from") == -31.5]
    assert [(row["range"], row["share"]) for row in zeros] == [
        ("exactly 0", 300 / 901),
        ("below float16", 300 / 901),
    ]
    assert "probably flushed" in [row["text"] for row in rows(panel, "text")]
    assert "about 33 % of the elements lost" in spec["vconcat"][1]["title"]["text"]


def test_a_scale_that_falls_is_shaded(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 31):
            writer.step(step, 2.0 ** (20 - step // 5), True, "GS000")
    _, [panel] = drawn(tmp_path / "run.gs")
    [shade] = rows(panel, "rect")
    assert (shade["first"], shade["last"]) == (4, 31)


def test_a_long_title_is_cut_at_the_semicolon(tmp_path):
    what = f"the loss is nan{' again' * 9}; reported twice (steps 3 and 999)"
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1.0, True, "GS000")
        writer.event("GS104", step=1, data={"what": what})
    spec, _ = drawn(tmp_path / "run.gs")
    assert spec["title"]["text"] == f"GS104 the loss is nan{' again' * 9}"


# --- the loss -------------------------------------------------------------------------


def written(path, losses):
    """Write a run with these losses; return the panel of its loss."""
    with RunWriter(path, backlog=1 << 20) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.step(step, 1024.0, True, "GS000", loss=loss)
    spec, panels = drawn(path)
    return spec["vconcat"][1], panels[1]


def test_the_loss_is_drawn_below_the_scale(tmp_path):
    spec, panel = written(tmp_path / "run.gs", [3.0, 2.0, math.nan, math.inf, 1.5])
    points = [(row["step"], row["mean"]) for row in rows(panel, "line")]
    assert points == [(1, 3.0), (2, 2.0), (5, 1.5)]
    assert spec["layer"][1]["encoding"]["y"]["scale"]["type"] == "linear"


def test_a_loss_over_many_magnitudes_has_a_logarithmic_axis(tmp_path):
    spec, _ = written(tmp_path / "run.gs", [1e-3, 1.0, 1e3])
    assert spec["layer"][1]["encoding"]["y"]["scale"]["type"] == "log"


def test_the_loss_of_a_long_run_is_drawn_as_mean_and_range(tmp_path):
    spec, panel = written(tmp_path / "run.gs", [1.0, 3.0] * 2000)
    points = rows(panel, "line")
    assert len(points) == 500
    assert points[1] == {"step": 9, "mean": 2.0, "low": 1.0, "high": 3.0}
    assert spec["title"]["text"].endswith("mean and range of 8 steps")


def test_a_run_without_a_finite_loss_has_no_panel_of_it(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step, loss in enumerate((None, math.nan, math.inf), start=1):
            writer.step(step, 1024.0, True, "GS000", loss=loss)
    assert len(drawn(tmp_path / "run.gs")[1]) == 1


def test_a_loss_that_is_far_beyond_float32_is_left_out(tmp_path):
    _, panel = written(tmp_path / "run.gs", [1.0, 1e300, -1e308, 2.0])
    assert [row["mean"] for row in rows(panel, "line")] == [1.0, 2.0]


def test_no_two_verdicts_look_the_same(tmp_path):
    looks = [(style.colour, style.shape) for style in VERDICT_STYLES.values()]
    assert len(set(looks)) == len(looks)
    hopeless = [Verdict(code) for code in codes_where(lambda row: row.hopeless)]
    colours = [VERDICT_STYLES[verdict].colour for verdict in hopeless]
    assert len(set(colours)) == len(colours)


def test_one_step_is_not_several(tmp_path):
    written(tmp_path / "run.gs", [1.0])
    spec, _ = drawn(tmp_path / "run.gs")
    assert spec["title"]["subtitle"] == "run.gs: 1 step, 0 skipped"
