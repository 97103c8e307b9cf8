"""The underflow table: names, estimates, and one piece of advice."""

import io
import re

import pytest
from rich.console import Console, Group

from gradscale.diagnosis import diagnose_run
from gradscale.report.columns import shortened
from gradscale.report.run_screen import run_screen
from gradscale.report.underflow_screen import underflow_parts
from gradscale.runfile import BINS, RunWriter, TensorSample, open_run

LONG = "encoder.layers.11.attention.self.query_projection.weight"


def sample(bins, zeros=0, below=0):
    """Return a sample with counts by exponent."""
    counts = [bins.get(place - 24, 0) for place in range(BINS)]
    total = zeros + below + sum(counts)
    return TensorSample(total, zeros, sum(counts[:10]), counts, below)


HEALTHY = sample({-2: 300, 0: 200})
SINKING = sample({-24: 300, -23: 200, -22: 100, 0: 1}, zeros=300)
ZEROS = sample({}, zeros=99)


def diagnosed(path, seen, steps=1):
    """Return the diagnosis of a run with a sample in every step."""
    with RunWriter(path) as writer:
        for step in range(1, steps + 1):
            writer.step(step, 1.0, True, "GS000", amax=1.0)
            writer.samples(step, seen)
    with open_run(path) as run:
        return diagnose_run(run)


def printed(what, width):
    console = Console(width=width, file=io.StringIO())
    console.print(what)
    return console.file.getvalue()


def table(path, seen, width=100):
    parts = underflow_parts(diagnosed(path, seen).underflow, width)
    return printed(Group(*parts), width)


def first_words(shown):
    """Return the first column of the table."""
    lines = shown.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("────"))
    return [re.split(r"  +", line.strip())[0] for line in lines[begin + 1 :]]


@pytest.mark.parametrize("width", [44, 60, 80, 100, 120])
def test_no_name_is_broken_over_lines(tmp_path, width):
    shown = table(tmp_path / "run.gs", {LONG: HEALTHY, "head.bias": HEALTHY}, width)
    names = first_words(shown)
    assert names[0] == "all tensors"
    assert names[2] == "head.bias"
    front, _, back = names[1].partition("…")
    assert LONG.startswith(front)
    assert LONG.endswith(back)
    assert len(front) >= 5


@pytest.mark.parametrize("width", [40, 44, 60, 80, 100])
def test_the_table_fits_the_terminal(tmp_path, width):
    seen = {LONG: SINKING, "head.bias": ZEROS}
    shown = printed(run_screen(diagnosed(tmp_path / "run.gs", seen), width), width)
    assert max(map(len, shown.splitlines())) <= width


def test_a_wide_terminal_shows_names_and_all_scales(tmp_path):
    shown = table(tmp_path / "run.gs", {LONG: HEALTHY}, 160)
    assert LONG in shown
    assert all(f"at 2^{shift}" in shown for shift in (-8, -4, 4, 8))


@pytest.mark.parametrize("width", range(3, 60))
def test_a_shortened_name_keeps_both_ends(width):
    short = shortened(LONG, width)
    assert len(short) == min(width, len(LONG))
    front, _, back = short.partition("…")
    assert (LONG.startswith(front), LONG.endswith(back)) == (True, True)


def test_all_zero_tensors_come_first_and_take_half_of_the_rows(tmp_path):
    seen = {f"up.{n}": SINKING for n in range(20)} | {
        f"low.{n}": ZEROS for n in range(20)
    }
    names = first_words(table(tmp_path / "run.gs", seen))
    low, up = ([f"{kind}.{n}" for n in range(5)] for kind in ("low", "up"))
    assert names[:7] == ["all tensors", *low, "… 15 more all-zero"]
    assert names[7:13] == [*up, "and 15 tensors with no larger loss"]


def test_a_single_further_all_zero_tensor_is_shown_instead_of_counted(tmp_path):
    seen = {f"up.{n}": SINKING for n in range(20)} | {
        f"low.{n}": ZEROS for n in range(6)
    }
    names = first_words(table(tmp_path / "run.gs", seen))
    assert names[1:8] == [*(f"low.{n}" for n in range(6)), "up.0"]


def test_estimates_and_unknown_values_are_marked(tmp_path):
    shown = table(tmp_path / "run.gs", {"w": SINKING, "first": ZEROS}, 120)
    [row] = [line.split() for line in shown.splitlines() if line.startswith("first ")]
    assert row == [
        "first",
        "100.0",
        "%",
        "–",
        "~100",
        "%",
        *["~100", "%"] * 2,
        "?",
        "?",
    ]
    assert "~ estimate, ? unknown" in shown


def test_a_counted_value_is_not_marked_as_an_estimate(tmp_path):
    shown = table(tmp_path / "run.gs", {"w": sample({-20: 40, 0: 50}, below=10)}, 120)
    [row] = [line for line in shown.splitlines() if line.startswith("w ")]
    assert re.split("  +", row)[3] == "10.0 %"
    assert "estimate" not in shown


def test_true_zeros_have_a_sentence_of_their_own(tmp_path):
    shown = table(tmp_path / "run.gs", {"head": HEALTHY, "query": ZEROS}, 120)
    [row] = [line.split() for line in shown.splitlines() if line.startswith("query ")]
    assert row == ["query", "100.0", "%", *["–"] * 6]
    assert "1 gradient has only zeros at a scale that flushes little" in shown


def test_advice_of_a_finding_is_not_repeated(tmp_path):
    seen = {"w": SINKING, "first": ZEROS}
    diagnosis = diagnosed(tmp_path / "run.gs", seen, steps=3)
    shown = printed(run_screen(diagnosis, 120), 120)
    assert [finding.code for finding in diagnosis.findings] == ["GS209"]
    assert len(re.findall("raise", shown)) == 1
    assert "About 40 % of the elements are lost at S = 2^0; see GS209 below" in shown


def test_without_a_finding_the_table_has_advice(tmp_path):
    shown = table(tmp_path / "run.gs", {"w": sample({-20: 40, 0: 50}, below=5)}, 120)
    assert "About 5.3 % of the elements are lost at S = 2^0: raise it to 2^13," in shown
