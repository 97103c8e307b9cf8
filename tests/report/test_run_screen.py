"""The screens of a run, and the values in its charts."""

import io
import re

import pytest
from rich.console import Console

from gradscale.core.records import Verdict
from gradscale.diagnosis import diagnose_run
from gradscale.diagnosis.following import Follower
from gradscale.diagnosis.timeline import Timeline
from gradscale.report.chart import mark_legend, scale_chart
from gradscale.report.columns import short_names, shortened
from gradscale.report.run_screen import headline, run_screen, summary
from gradscale.report.style import VERDICT_STYLES
from gradscale.report.tail_screen import tail_screen, vitals
from gradscale.runfile import RunWriter, open_run
from tests.diagnosis import runs

OK = Verdict.OK


def timeline_of(log2s, marks=()):
    """Return the timeline of a scale, with verdicts at some steps."""
    timeline, verdicts = Timeline(), dict(marks)
    for step, log2 in enumerate(log2s, start=1):
        timeline.note(step, 2.0**log2, verdicts.get(step, OK))
    return timeline


def chart(timeline, width=28, **options):
    return scale_chart(timeline, width, **options).plain.splitlines()


def printed(what, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(what)
    return console.file.getvalue()


def diagnosed(path):
    with open_run(path) as run:
        return diagnose_run(run)


# --- the chart ------------------------------------------------------------------------


def test_a_constant_scale_is_one_line_at_its_power():
    lines = chart(timeline_of([10] * 50), braille=False)
    [line] = [line for line in lines if "*" in line]
    place = lines.index(line)
    assert line == "       |" + "*" * 19
    assert [lines[place - 1][:6], lines[place + 1][:6]] == ["  2^11", "   2^9"]


def test_a_change_of_the_scale_is_at_its_step():
    lines = chart(timeline_of([10] * 10 + [12] * 10), width=29, braille=False)
    rows = {line[:6].strip(): line[8:] for line in lines if "*" in line}
    assert rows["2^10"] == "*" * 11
    assert rows["2^12"] == " " * 10 + "*" * 10


def test_a_jump_is_joined_by_a_line():
    lines = chart(timeline_of([10] * 10 + [13] * 10), width=29, braille=False)
    assert sum("*" in line for line in lines) == 4


def test_a_power_of_two_is_drawn_in_the_middle_of_its_line():
    lines = chart(timeline_of([10] * 50), width=29)
    [line] = [line[8:] for line in lines if re.search("[\u2801-\u28ff]", line)]
    assert line == "⠤" * 20


@pytest.mark.parametrize("span", [1, 5, 12, 40, 100])
def test_a_chart_has_at_most_its_lines(span):
    lines = chart(timeline_of([0] * 5 + [span] * 5))
    # Two more lines: axis and step numbers; all verdicts are ok.
    assert 6 <= len(lines) - 2 <= 12


@pytest.mark.parametrize("span", [1, 5, 12, 40, 100])
def test_every_power_of_a_chart_is_within_its_labels(span):
    lines = chart(timeline_of([0] * 5 + [span] * 5), braille=False)
    labels = [
        int(found[1]) for line in lines if (found := re.search(r"2\^(\S+)", line))
    ]
    assert labels == sorted(labels, reverse=True)
    assert labels[0] >= span


def test_letters_are_below_their_step():
    marks = [(1, Verdict.CALIBRATING), (20, Verdict.FORWARD_NONFINITE)]
    lines = chart(timeline_of([10] * 20, marks), width=29, braille=False)
    assert lines[-2] == " " * 8 + "c" + " " * 18 + "F"


def test_the_most_severe_verdict_of_a_column_is_shown():
    marks = [(n, Verdict.OVERFLOW) for n in range(1, 9)] + [(9, Verdict.GENUINE)]
    lines = chart(timeline_of([10] * 200, marks), width=19)
    assert lines[-2].strip() == "G"


def test_of_ordinary_skips_the_most_frequent_is_shown():
    marks = [(n, Verdict.CALIBRATING) for n in range(1, 9)] + [(9, Verdict.OVERFLOW)]
    lines = chart(timeline_of([10] * 200, marks), width=19)
    assert lines[-2].strip() == "c"


def test_the_legend_has_only_the_verdicts_of_the_run():
    timeline = timeline_of([10] * 9, [(3, Verdict.PROBING), (5, Verdict.COLLAPSE)])
    assert mark_legend(timeline).plain == "C collapse  p probing"


def test_every_verdict_has_a_style_and_a_letter_of_its_own():
    letters = [style.letter for style in VERDICT_STYLES.values()]
    assert set(VERDICT_STYLES) == set(Verdict)
    assert len(set(letters)) == len(letters)


# --- the screen -----------------------------------------------------------------------


def test_a_healthy_run_has_a_headline_and_its_one_finding(tmp_path):
    runs.write(tmp_path / "run.gs", runs.healthy())
    shown = printed(run_screen(diagnosed(tmp_path / "run.gs"), 100))
    assert "run.gs  healthy  3,000 steps, 17 skipped (0.6 %)" in shown
    assert "GS001 calibrated: S 2^24 -> 2^15 after 9 skips (normal)" in shown


def test_many_phases_are_cut_in_the_middle(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 601):
            bad = step % 30 < 4
            code = "GS204" if bad else "GS000"
            writer.step(step, 4.0, not bad, code, amax=1.0)
    shown = printed(run_screen(diagnosed(tmp_path / "run.gs"), 100))
    assert re.search(r"… \d+ more", shown)


def test_the_summary_of_a_run_on_two_ranks_names_the_rank(tmp_path):
    with RunWriter(
        tmp_path / "run.gs", rank=1, world_size=2, every_rank=True
    ) as writer:
        writer.step(1, 1024.0, True, "GS000", 0.5, 2047.0, 2.5)
    shown = summary(diagnosed(tmp_path / "run.rank1.gs"))
    assert shown["ranks"] == "rank 1 of 2"
    assert shown["scale"] == "2^10 throughout"
    assert shown["headroom"] == "5.0 bits below 65504"
    assert (shown["loss"], shown["norm"]) == (
        "2.5 -> 2.5",
        "0.5, unscaled, at the last step",
    )


def test_a_run_that_failed_names_its_error(tmp_path):
    writer = RunWriter(tmp_path / "run.gs")
    writer.step(1, 1024.0, True, "GS000")
    writer.close("error", error="KeyError")
    shown = summary(diagnosed(tmp_path / "run.gs"))
    assert shown["run"].startswith("ended with KeyError")


@pytest.mark.parametrize(
    ("ended", "text"), [(True, "no steps recorded"), (False, "no steps yet")]
)
def test_the_headline_of_an_empty_run_depends_on_whether_it_has_ended(
    tmp_path, ended, text
):
    writer = RunWriter(tmp_path / "run.gs")
    if ended:
        writer.close()
    shown = headline(diagnosed(tmp_path / "run.gs")).plain
    writer.close()
    assert shown == f"run.gs  not judged  {text}"


def test_steps_without_gradients_are_counted_apart(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 6):
            writer.step(step, 1024.0, False, "GS103")
        writer.step(6, 1024.0, False, "GS201")
    shown = headline(diagnosed(tmp_path / "run.gs")).plain
    assert shown.endswith("6 steps, 1 skipped (16.7 %), 5 without gradients")


def test_long_names_of_culprits_are_shortened_in_the_middle(tmp_path):
    name = "encoder.layers.11.attention.self.query_projection.weight"
    runs.write(
        tmp_path / "run.gs",
        runs.collapse(),
        culprits=lambda record: () if record.finite else (name,),
    )
    shown = printed(run_screen(diagnosed(tmp_path / "run.gs"), 80), 80)
    assert re.search(r"encoder\.la\S+…\S+weight +101 +101 +0 +300 – 400", shown)


LORA = "base_model.model.transformer.h.{}.attn.c_attn.lora_{}.default.weight"
LORAS = [LORA.format(layer, matrix) for layer in (0, 1) for matrix in "AB"]


@pytest.mark.parametrize("width", [44, 60, 80, 100])
def test_long_names_lose_what_they_have_in_common_and_stay_apart(tmp_path, width):
    runs.write(
        tmp_path / "run.gs",
        runs.collapse(),
        culprits=lambda record: () if record.finite else LORAS,
    )
    shown = printed(run_screen(diagnosed(tmp_path / "run.gs"), width), width)
    names = re.findall(r"^  (…\S+) +101\b", shown, re.MULTILINE)
    assert [re.findall(r"h\.\d.attn.c_attn.lora_.", name) for name in names] == [
        [f"h.{layer}.attn.c_attn.lora_{each}"] for layer in (0, 1) for each in "AB"
    ]


@pytest.mark.parametrize("width", range(14, 70))
def test_names_of_which_some_fit_are_told_apart_if_room_allows(width):
    names = [*LORAS, "lm_head.weight", "all tensors"]
    short = short_names(names, width)
    assert max(map(len, short)) <= width
    assert short[4:] == [shortened(name, width) for name in names[4:]]
    assert len(set(short)) == 6 or width < 23


def test_names_without_common_modules_are_cut_where_they_stay_apart():
    names = [f"a{'x' * 30}.b{'y' * 30}.{n}.weight" for n in (1, 2)]
    names[1] = names[1].replace("ax", "cx")
    assert len(set(short_names(names, 12))) == 2


@pytest.mark.parametrize(("amax", "text"), [(65504.0 * 1.25, "0.3 bits above 65504")])
def test_gradients_beyond_float16_are_above_it(tmp_path, amax, text):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000", amax=amax)
    assert summary(diagnosed(tmp_path / "run.gs"))["headroom"] == text
    assert vitals(followed(tmp_path / "run.gs"))["headroom"] == text


def test_a_share_of_nearly_all_steps_is_not_all_of_them(tmp_path):
    with RunWriter(tmp_path / "run.gs", backlog=1 << 20) as writer:
        for step in range(1, 4001):
            skipped = step in (100, 200)
            writer.step(step, 4.0, not skipped, "GS201" if skipped else "GS000")
    shown = printed(run_screen(diagnosed(tmp_path / "run.gs"), 100))
    assert re.search(r"ok +GS000 +3,998 +99\.95 %", shown)


def test_a_run_that_was_killed_is_told_in_the_headline(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        writer.flush()
        shown = headline(diagnosed(tmp_path / "run.gs")).plain
    assert shown == "run.gs  healthy  1 step, 0 skipped, still running, or killed"
    assert "killed" not in headline(diagnosed(tmp_path / "run.gs")).plain


@pytest.mark.parametrize("width", [40, 44, 50, 60, 80])
def test_a_narrow_screen_keeps_names_and_whole_numbers(tmp_path, width):
    runs.write(tmp_path / "run.gs", runs.collapse(), culprits=runs.sick_tensors)
    shown = printed(run_screen(diagnosed(tmp_path / "run.gs"), width), width)
    assert max(map(len, shown.splitlines())) <= width
    assert re.search(r"(decoder\.3\.|…)ffn\.o\.weight +101", shown)
    assert re.search(r"collapse +\S* *60", shown)
    assert not re.search(r"\d…", shown)


# --- the live screen ------------------------------------------------------------------


def followed(path):
    with open_run(path) as run:
        follower = Follower(run)
        follower.poll()
    return follower


def test_the_live_screen_has_the_values_of_the_last_step(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_loss(steps=170))
    shown = vitals(followed(tmp_path / "run.gs"))
    assert shown["step"] == "170"
    assert shown["skipped"] == "71, 71 of the last 100"
    assert shown["loss"] == "nan"


def test_the_window_of_recent_skips_is_no_longer_than_the_run(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_loss(steps=60, since=41))
    shown = vitals(followed(tmp_path / "run.gs"))
    assert shown["skipped"] == "20, 20 of the last 60"


def test_the_live_screen_shows_how_long_a_run_has_been_silent(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        writer.flush()
        follower = followed(tmp_path / "run.gs")
    late = follower.last.time + 100.0
    shown = printed(tail_screen(follower, "run.gs", 100, now=lambda: late))
    assert "no new step for 100 s" in shown


def test_the_live_screen_of_an_empty_run_has_no_chart(tmp_path):
    with RunWriter(tmp_path / "run.gs"):
        follower = followed(tmp_path / "run.gs")
    assert "no steps yet" in printed(tail_screen(follower, "run.gs", 100))
