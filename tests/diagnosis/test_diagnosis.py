"""A run file in, findings out: the same that were said live."""

import math
import subprocess
import sys

import pytest

from gradscale.core.records import Verdict
from gradscale.diagnosis import diagnose_run
from gradscale.judge.findings import Health, by_severity
from gradscale.runfile import RunWriter, open_run
from tests.diagnosis import runs
from tests.diagnosis.runs import diagnosed, facts
from tests.judge import histories

HISTORIES = {
    "healthy": runs.healthy,
    "saw_tooth": runs.saw_tooth,
    "collapse": runs.collapse,
    "nan_loss": runs.nan_loss,
    "nan_gradients": runs.nan_gradients,
    "glm_130b": histories.glm_130b,
    "bigscience_104b": histories.bigscience_104b,
    "bigscience_13b": histories.bigscience_13b,
    "opt_175b": histories.opt_175b,
}


# --- the file says what was said live -------------------------------------------------


@pytest.mark.parametrize("name", HISTORIES)
def test_a_file_gives_the_findings_of_the_live_run(tmp_path, name):
    said = runs.write(
        tmp_path / "run.gs",
        HISTORIES[name](),
        culprits=runs.sick_tensors,
        policy={**runs.POLICY, "min_scale": _floor(name)},
    )
    assert diagnosed(tmp_path / "run.gs").findings == tuple(by_severity(said))


def _floor(name):
    return 2.0**-13 if name == "opt_175b" else 2.0**-24


STRANGE = {
    "weights": facts(weights_finite=False, nan=True),
    "norm": facts(finite=True, norm_finite=False, amax=60000.0, grad_norm=math.inf),
    "scaled_loss": facts(scaled_loss_finite=False, loss=700.0, amax=math.inf),
    "no_gradients": facts(read=False, finite=True, amax=0.0),
    "tiny": facts(finite=True, applied=True, amax=2.0**-20),
    "all_zero": facts(finite=True, applied=True, amax=0.0, grad_norm=0.0),
    "fixed": facts(amax=math.inf),
    "idle_optimizer": facts(finite=True, applied=False),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_wrong_for_120_steps_is_found_again(tmp_path, name):
    well = facts(finite=True, applied=True, loss=2.0)
    records = [well._replace(step=n, calibrated=n > 1) for n in range(1, 40)]
    records += [STRANGE[name]._replace(step=n) for n in range(40, 160)]
    records += [well._replace(step=n) for n in range(160, 200)]
    said = runs.write(tmp_path / "run.gs", records)
    diagnosis = diagnosed(tmp_path / "run.gs")
    assert diagnosis.findings == tuple(by_severity(said))
    assert bool(said) is (name != "idle_optimizer")


@pytest.mark.parametrize("name", HISTORIES)
def test_a_file_gives_the_verdicts_of_the_live_run(tmp_path, name):
    runs.write(tmp_path / "run.gs", HISTORIES[name]())
    with open_run(tmp_path / "run.gs") as run:
        codes = [row.verdict for row in run.steps()]
        found = diagnose_run(run).verdicts
    assert {v.code: n for v, n in found.items()} == {c: codes.count(c) for c in codes}


def test_the_floor_of_a_policy_that_is_not_known_is_where_the_run_collapsed(tmp_path):
    said = runs.write(tmp_path / "run.gs", runs.collapse(), policy=None)
    assert diagnosed(tmp_path / "run.gs").findings == tuple(by_severity(said))


# --- the verdict on the whole ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "health", "codes"),
    [
        ("healthy", Health.HEALTHY, ["GS001"]),
        ("saw_tooth", Health.HEALTHY, []),
        ("collapse", Health.COLLAPSE, ["GS208"]),
        ("nan_loss", Health.COLLAPSE, ["GS203"]),
        ("nan_gradients", Health.COLLAPSE, ["GS208"]),
    ],
)
def test_a_run_has_the_findings_of_its_sickness(tmp_path, name, health, codes):
    runs.write(tmp_path / "run.gs", HISTORIES[name]())
    diagnosis = diagnosed(tmp_path / "run.gs")
    assert diagnosis.health is health
    assert [finding.code for finding in diagnosis.findings] == codes


def test_a_run_without_a_step_is_healthy(tmp_path):
    RunWriter(tmp_path / "run.gs").close()
    diagnosis = diagnosed(tmp_path / "run.gs")
    assert (diagnosis.health, diagnosis.steps, diagnosis.phases) == (
        Health.HEALTHY,
        0,
        (),
    )


def test_steps_are_counted_as_taken_and_skipped(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_loss(steps=130, since=100))
    diagnosis = diagnosed(tmp_path / "run.gs")
    counts = diagnosis.steps, diagnosis.applied, diagnosis.skipped
    assert counts == (130, 99, 31)
    assert diagnosis.verdicts == {Verdict.OK: 99, Verdict.FORWARD_NONFINITE: 31}


def test_the_second_rank_has_a_file_of_its_own(tmp_path):
    for rank in (0, 1):
        with RunWriter(
            tmp_path / "run.gs", rank=rank, world_size=2, every_rank=True
        ) as writer:
            writer.step(1, 1024.0, True, "GS000", loss=float(rank))
    second = diagnosed(tmp_path / "run.rank1.gs")
    assert (second.meta["rank"], second.last.loss) == (1, 1.0)


def test_progress_adds_up_to_nearly_all_steps(tmp_path):
    runs.write(tmp_path / "run.gs", runs.saw_tooth(9000))
    told = []
    diagnosed(tmp_path / "run.gs", on_steps=told.append)
    assert sum(told) == 8192


# --- who and where --------------------------------------------------------------------


def test_where_is_the_first_culprit_that_was_recorded(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_gradients(), culprits=runs.sick_tensors)
    diagnosis = diagnosed(tmp_path / "run.gs")
    assert diagnosis.findings[0].where == "decoder.3.ffn.o.weight"


def test_culprits_are_counted_over_the_run(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_gradients(), culprits=runs.sick_tensors)
    first, second = diagnosed(tmp_path / "run.gs").culprits
    assert first.as_dict() == {
        "name": runs.SICK[0],
        "steps": 51,
        "first_in": 51,
        "nan": 0,
        "first": 100,
        "last": 150,
    }
    assert (second.name, second.steps, second.first_in) == (runs.SICK[1], 51, 0)


def test_culprits_come_from_peaks_where_no_event_names_them(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, False, "GS201", amax=math.nan)
        writer.peaks(1, {"a": 1.0, "b": math.nan, "c": math.inf})
    first, second = diagnosed(tmp_path / "run.gs").culprits
    assert (first.name, first.nan, second.name, second.nan) == ("b", 1, "c", 0)


def test_a_long_list_of_culprits_keeps_its_length(tmp_path):
    with RunWriter(tmp_path / "run.gs", meta={"parameters": ["x"] * 40}) as writer:
        for step in range(1, 60):
            bad = step >= 30
            scale = 2.0 ** (16 - max(0, step - 30))
            writer.step(step, scale, not bad, "GS201" if bad else "GS000", None, 1.0)
            if step == 30:
                data = {"culprits": ["a.weight", "b.weight"], "count": 40}
                writer.event("GS201", step=step, where="a.weight", data=data)
    [finding] = diagnosed(tmp_path / "run.gs").findings
    assert finding.evidence["culprits"] == 40


def test_a_message_that_the_steps_do_not_tell_is_a_finding(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        for _ in range(3):
            writer.event("GS105", step=1, where="head.weight")
    [finding] = diagnosed(tmp_path / "run.gs").findings
    assert (finding.code, finding.where) == ("GS105", "head.weight")
    assert finding.evidence == {"times": 3}
    assert finding.advice


def test_a_code_of_a_newer_version_is_told_as_such(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.event("GS999")
    [finding] = diagnosed(tmp_path / "run.gs").findings
    assert (finding.code, "newer version" in finding.what) == ("GS999", True)


def test_a_recorded_finding_that_the_steps_do_not_give_is_kept(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        data = {"what": "seen live", "evidence": {"nan": True}, "advice": ["look"]}
        writer.event("GS208", step=1, data=data)
    diagnosis = diagnosed(tmp_path / "run.gs")
    [finding] = diagnosis.findings
    assert (finding.what, finding.advice) == ("seen live", ("look",))
    assert diagnosis.health is Health.COLLAPSE


def test_what_is_printed_has_exactly_the_agreed_keys(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_loss())
    told = diagnosed(tmp_path / "run.gs").verdict_as_dict()
    [finding] = told["findings"]
    assert list(told) == ["verdict", "findings", "not_judged"]
    assert list(finding) == [
        *("code", "cause", "where", "step", "since", "what", "cost", "evidence"),
        "advice",
    ]


def test_normal_findings_are_not_among_those_of_a_verdict(tmp_path):
    runs.write(tmp_path / "run.gs", runs.healthy())
    told = diagnosed(tmp_path / "run.gs").verdict_as_dict()
    assert told == {"verdict": "healthy", "findings": [], "not_judged": []}


# --- what could not be judged ---------------------------------------------------------


@pytest.mark.parametrize(("steps", "judged"), [(49, False), (50, True)])
def test_trends_are_not_judged_in_fewer_than_50_steps(tmp_path, steps, judged):
    runs.write(tmp_path / "run.gs", runs.saw_tooth(steps))
    words = f"trends: the run has {steps} steps, at least 50 are needed"
    wanted = () if judged else (words,)
    assert diagnosed(tmp_path / "run.gs").not_judged == wanted


def unjudged(path, *notes):
    """Write 60 finite steps, and what could not be judged; return the diagnosis."""
    runs.write(path, runs.saw_tooth(60))
    with RunWriter(path, resume=True) as writer:
        for what in notes:
            data = {"observed": "not_judged", "what": what}
            writer.event("GS000", step=2, data=data)
    return diagnosed(path)


def test_what_the_recording_could_not_observe_is_not_judged(tmp_path):
    diagnosis = unjudged(tmp_path / "run.gs", "the loop: its graph is compiled")
    assert diagnosis.not_judged == ("the loop: its graph is compiled",)
    assert diagnosis.as_dict()["not_judged"] == ["the loop: its graph is compiled"]


def test_notes_of_any_number_and_kind_are_shown_in_part(tmp_path):
    assert unjudged(tmp_path / "run.gs", *range(99)).not_judged == tuple("01234567")


# --- observations in the file ---------------------------------------------------------


def test_a_message_with_the_code_of_a_wrong_use_has_its_cause(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        writer.event("GS115", step=1, data={"what": "seen live"})
    [finding] = diagnosed(tmp_path / "run.gs").findings
    assert (finding.code, finding.cause) == ("GS115", "stepped-directly")


ENDED = """
import sys
from gradscale.errors import GradientError
from gradscale.runfile import RunWriter
writer = RunWriter(sys.argv[1])
raise GradientError("The gradients are float16. Cast them.", code="GS105")
"""


def test_a_run_that_an_error_has_ended_is_not_healthy(tmp_path):
    command = [sys.executable, "-c", ENDED, str(tmp_path / "run.gs")]
    assert subprocess.run(command, capture_output=True).returncode == 1
    diagnosis = diagnosed(tmp_path / "run.gs")
    [finding] = diagnosis.findings
    assert (diagnosis.health.exit_code, finding.code) == (1, "GS105")
    assert finding.what == (
        "the run ended with GradientError: The gradients are float16. Cast them."
    )
