"""A part of the zoo, of every cause: `make zoo` runs all of it.

Sick scripts, each with a twin that differs in one line, run unmodified below
`gradscale run`; `gradscale doctor` must name the cause and the location, and find
nothing in the twins. `diff tests/zoo/open/tidy_trainer/*.py` shows a pair.
"""

import difflib

import pytest

from gradscale.diagnosis import diagnose_run
from gradscale.judge.findings import Finding
from gradscale.runfile import StepRow, open_run
from tests.zoo.checking import as_recorded, contradicted, rejudged
from tests.zoo.scoring import HERE, judged, launcher, scripts_of

# One case of each cause, and two for the commonest.
FAST = (
    *("clip_norm_cnn", "logged_norm_by_hand", "norm_of_first_micro_batch"),
    *("skip_bad_norm", "class_by_class", "gan_critic", "two_optimizers"),
    *("tidy_trainer", "probing_ranker", "step_function", "new_head", "half_sgd"),
    *("default_autocast", "raw_income", "where_root", "survey_epochs", "codebook"),
    *("auxiliary_head", "eager_growth", "linear_warmup", "longer_horizon"),
    *("sharp_contrast", "tiny_eps", "heavy_tailed_returns"),
)
SCRIPTS = [script for script in scripts_of("open") if script.name in FAST]
SICK = [script for script in SCRIPTS if script.sick]
HEALTHY = [script for script in SCRIPTS if not script.sick]
ALL = [*scripts_of("open"), *scripts_of("kept")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the diagnosis of each script, by script."""
    folder = tmp_path_factory.mktemp("zoo")
    return {result.script: result for result in judged(SCRIPTS, folder, at_once=2)}


@pytest.mark.parametrize("script", SICK, ids=str)
def test_the_cause_of_a_sick_script_is_named_first(results, script):
    assert results[script].first.get("cause") == script.cause


@pytest.mark.parametrize("script", [s for s in SICK if s.places], ids=str)
def test_the_location_of_the_fault_is_named(results, script):
    assert results[script].right_place


@pytest.mark.parametrize("script", HEALTHY, ids=str)
def test_nothing_is_found_in_a_healthy_script(results, script):
    assert (results[script].verdict, results[script].findings) == ("healthy", [])


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_ends_as_under_torch(results, script):
    assert results[script].ended == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_the_file_gives_the_findings_that_were_reported_live(results, script):
    live, found = rejudged(results[script].record)
    assert [as_recorded(finding) for finding in found] == live


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_no_finding_contradicts_the_rows(results, script):
    with open_run(results[script].record) as run:
        rows, diagnosis = list(run.steps()), diagnose_run(run)
    _, found = rejudged(results[script].record)
    wrong = [contradicted(each, rows) for each in (*found, *diagnosis.findings)]
    assert [claims for claims in wrong if claims] == []


def test_a_scale_far_below_1_that_fits_is_no_collapse(tmp_path):
    record = tmp_path / "run.gs"
    with launcher(tmp_path) as run:
        assert run({record: HERE / "raw_prices.py"}) == [0]
    with open_run(record) as run:
        diagnosis = diagnose_run(run)
    assert (str(diagnosis.health), diagnosis.serious) == ("healthy", ())


def test_a_contradiction_is_noticed():
    rows = [
        StepRow(1, 0.0, 4.0, True, "GS000", None, 1.0, 2.0),
        StepRow(2, 0.0, 4.0, False, "GS203", None, None, None),
    ]
    finding = Finding(
        code="GS203",
        cause="",
        where="",
        step=2,
        since=1,
        what="",
        cost="",
        evidence={"loss": "nan", "steps": 2, "of": 2, "scale": "2^3"},
        advice=(),
        more="",
    )
    assert contradicted(finding, rows) == [
        "it begins at a step that was taken",
        "more steps were lost than there are",
        "a scale that no row has",
    ]


def test_every_case_of_the_fast_part_exists():
    assert {script.name for script in SCRIPTS} == set(FAST)


@pytest.mark.parametrize("script", [s for s in ALL if s.sick], ids=str)
def test_twins_differ_in_one_place(script):
    sick, well = (
        (HERE / script.half / script.name / f"{twin}.py").read_text().splitlines()
        for twin in ("sick", "well")
    )
    marks = [line[0] for line in difflib.ndiff(sick, well)]
    assert 1 <= max(marks.count("-"), marks.count("+")) <= 5


@pytest.mark.parametrize("script", ALL, ids=str)
def test_a_script_does_not_mention_gradscale(script):
    assert "gradscale" not in script.path.read_text()
