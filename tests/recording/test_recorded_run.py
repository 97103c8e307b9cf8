"""One recorded run: every step is judged, written, passed on and reported."""

import json
import logging
import math

import pytest

from gradscale import StepRecord, __version__
from gradscale.diagnosis import diagnose_run
from gradscale.judge.judge import Judge
from gradscale.recording import recorded_run
from gradscale.recording.process import Process
from gradscale.recording.recorded_run import RecordedRun
from gradscale.recording.recorder import Recorder
from gradscale.runfile import TensorSample, open_run

# A loss that is not finite; ten in a row are hopeless at any scale.
LOST = StepRecord(1, 1024.0, False, False, loss_finite=False, amax=math.nan)


class Seen:
    """A sink that keeps what it receives."""

    def __init__(self):
        self.steps = []

    def see(self, record, judgement):
        self.steps.append((record.step, judgement.verdict.code))


@pytest.fixture(autouse=True)
def _bundles_go_to_the_folder_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_run, "BUNDLES", tmp_path)


@pytest.fixture(autouse=True)
def _no_log_handlers(monkeypatch):
    """Findings go to stderr, though pytest sets log handlers of its own."""
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: False)


def healthy(step):
    return StepRecord(step, 1024.0, True, True, amax=3.0, loss=0.5)


def lost(run, steps, **options):
    for step in range(1, steps + 1):
        run.record_step(LOST._replace(step=step), **options)


def test_a_step_reaches_the_file_and_the_sinks(tmp_path):
    sinks = [Seen(), Seen()]
    run = RecordedRun(recorder=Recorder(tmp_path / "run.gs"), sinks=sinks)
    for step in (1, 2, 3):
        run.record_step(healthy(step))
    run.close()
    assert [sink.steps for sink in sinks] == [[(n, "GS000") for n in (1, 2, 3)]] * 2
    with open_run(tmp_path / "run.gs") as file:
        assert [(row.step, row.loss) for row in file.steps()] == [
            (1, 0.5),
            (2, 0.5),
            (3, 0.5),
        ]
        assert file.meta["end"]["state"] == "closed"


def test_culprits_peaks_and_samples_reach_the_file(tmp_path):
    run = RecordedRun(recorder=Recorder(tmp_path / "run.gs"))
    sample = {"a": TensorSample(4, 1, 0, [0] * 40, nonfinite=3)}
    run.record_step(LOST, ["a"], {"a": math.nan, "b": 1.0}, sample)
    run.close()
    with open_run(tmp_path / "run.gs") as file:
        assert [event.where for event in file.events()] == ["a"]
        assert file.peaks(1)["b"] == 1.0
        assert [row.tensor for row in file.samples()] == ["a"]


def test_the_file_names_the_framework_and_the_advice_its_calls(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    run = RecordedRun(recorder=recorder, versions={"jax": "1"}, quiet=True)
    for step in range(1, 21):
        nan = {"applied": False, "finite": False, "nan": True}
        record = healthy(step)._replace(scale=2.0**-step, amax=math.nan, **nan)
        findings = run.record_step(record, ["a"]).findings
        if findings:
            break
    run.close()
    with open_run(tmp_path / "run.gs") as file:
        assert file.meta["framework"] == "jax"
        diagnosis = diagnose_run(file)
    assert "Precision(..., keep=...)" in findings[0].text()
    assert [f.text() for f in diagnosis.findings] == [f.text() for f in findings]


def test_the_judgement_is_that_of_a_judge():
    run, judge = RecordedRun(), Judge()
    for step in range(1, 30):
        record = LOST._replace(step=step) if step % 7 == 0 else healthy(step)
        assert run.record_step(record) == judge.see(record)


def test_findings_are_printed_on_rank_0_alone(capsys):
    lost(RecordedRun(process=lambda: Process(rank=1, world_size=2)), 12)
    assert capsys.readouterr().err == ""
    lost(RecordedRun(process=lambda: Process(rank=0, world_size=2)), 12)
    assert "GS203" in capsys.readouterr().err


def test_a_finding_reported_elsewhere_is_recorded_and_not_printed(tmp_path, capsys):
    recorder = Recorder(tmp_path / "run.gs")
    run = RecordedRun(recorder=recorder, reported_elsewhere=["GS203"])
    lost(run, 12)
    assert capsys.readouterr().err == ""
    run.close()
    with open_run(tmp_path / "run.gs") as file:
        assert "GS203" in [event.code for event in file.events()]


def test_a_hopeless_run_is_stopped_with_a_bundle_if_guarded(tmp_path):
    run = RecordedRun(guard="raise", versions={"framework": "1.0"})
    lost(run, 60, state=lambda: {"scale": 1024.0})
    assert "GS203" in str(run.hopeless)
    [folder] = tmp_path.glob("gradscale-bundle-*")
    steps = json.loads((folder / "steps.json").read_text())
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert json.loads((folder / "scaler.json").read_text()) == {"scale": 1024.0}
    versions = json.loads((folder / "versions.json").read_text())
    assert (versions["framework"], versions["gradscale"]) == ("1.0", __version__)
    assert json.loads((folder / "manifest.json").read_text())["run file"] == "none"


def test_a_bundle_is_put_beside_the_run_file(tmp_path):
    (tmp_path / "runs").mkdir()
    recorder = Recorder(tmp_path / "runs" / "run.gs")
    run = RecordedRun(recorder=recorder, guard="raise")
    lost(run, 60, state=dict)
    run.close()
    assert "bundle" in str(run.hopeless)
    [folder] = (tmp_path / "runs").glob("gradscale-bundle-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["run file"] == str(tmp_path / "runs" / "run.gs")


def test_a_run_without_a_state_is_not_stopped(capsys):
    run = RecordedRun(guard="raise")
    lost(run, 60)
    assert run.hopeless is None
    assert "GS203" in capsys.readouterr().err


def test_a_finding_raised_elsewhere_stops_nothing(tmp_path, capsys):
    run = RecordedRun(guard="raise", raised_elsewhere=["GS203"])
    lost(run, 60, state=dict)
    assert run.hopeless is None
    # Its bundle is written all the same, for the error that is raised elsewhere.
    [bundle] = tmp_path.glob("gradscale-bundle-*")
    assert run.raised_text.endswith(f"bundle {bundle}")
    assert capsys.readouterr().err == ""


def test_the_finding_of_a_run_that_is_stopped_is_in_the_error_and_not_printed(capsys):
    run = RecordedRun(guard="raise")
    lost(run, 12, state=dict)
    assert str(run.hopeless).startswith("GS203 step 10: the loss is not finite")
    assert capsys.readouterr().err == ""


def test_a_bundle_holds_the_last_fifty_steps(tmp_path):
    run = RecordedRun()
    for step in range(1, 81):
        run.record_step(healthy(step))
    folder = run.write_bundle(tmp_path, {})
    steps = json.loads((folder / "steps.json").read_text())
    assert [step["step"] for step in steps] == list(range(31, 81))


def test_a_file_that_cannot_be_made_does_not_stop_a_step(tmp_path, capsys):
    sink = Seen()
    (tmp_path / "gone").mkdir()
    recorder = Recorder(tmp_path / "gone" / "run.gs")
    (tmp_path / "gone").rmdir()
    run = RecordedRun(recorder=recorder, sinks=[sink])
    for step in (1, 2, 3):
        run.record_step(healthy(step))
    run.close()
    assert [step for step, _ in sink.steps] == [1, 2, 3]
    assert capsys.readouterr().err.count("GS308") == 1


def test_an_observation_reaches_the_judge_and_the_file(tmp_path, capsys):
    run = RecordedRun(recorder=Recorder(tmp_path / "run.gs"))
    data = {"observed": "loop", "looks": 1, "direct_steps": 1}
    run.observe(2, data)
    found = [run.record_step(healthy(step)).findings for step in (1, 2, 3)]
    run.close()
    assert [len(each) for each in found] == [0, 1, 0]
    assert "GS115 step 2" in capsys.readouterr().err
    with open_run(tmp_path / "run.gs") as file:
        events = [(event.code, event.step, event.data) for event in file.events()]
    assert ("GS000", 2, data) in events


def test_what_is_still_open_at_the_end_is_printed_once(capsys):
    run = RecordedRun()
    lost(run, 3)
    assert capsys.readouterr().err == ""
    run.close()
    run.close()
    assert capsys.readouterr().err.count("GS203 step 3") == 1
