"""`gradscale doctor`: the verdict as text, JSON and exit code."""

import json

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.runfile import RunWriter
from tests.diagnosis import runs

CASES = {
    "healthy": (runs.healthy, "healthy", 0),
    "saw_tooth": (runs.saw_tooth, "healthy", 0),
    "collapse": (runs.collapse, "collapse", 2),
    "nan_loss": (runs.nan_loss, "collapse", 2),
}


def call(*arguments, columns=80):
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


@pytest.mark.parametrize("name", CASES)
def test_the_exit_code_is_that_of_the_verdict(tmp_path, name):
    history, verdict, code = CASES[name]
    runs.write(tmp_path / "run.gs", history())
    done = call("doctor", tmp_path / "run.gs", "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["verdict"] == verdict


@pytest.mark.parametrize(
    ("steps", "text"), [(50, "No steps skipped."), (400, "All skips are normal.")]
)
def test_a_healthy_run_has_one_line_about_skips(tmp_path, steps, text):
    runs.write(tmp_path / "run.gs", runs.saw_tooth(steps))
    lines = call("doctor", tmp_path / "run.gs").stdout.splitlines()
    assert lines[-1].rstrip() == f"Healthy. {text}"


def test_findings_short_of_a_collapse_have_exit_code_1(tmp_path):
    runs.write_sampled(tmp_path / "run.gs", [1.0] * 400)
    done = call("doctor", tmp_path / "run.gs", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["verdict"] == "findings"


def test_the_json_has_exactly_the_documented_keys(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_gradients(), culprits=runs.sick_tensors)
    data = json.loads(call("doctor", tmp_path / "run.gs", "--json").stdout)
    assert set(data) == {"verdict", "findings", "not_judged"}
    [finding] = data["findings"]
    assert set(finding) == {
        *("code", "cause", "where", "step", "since", "what", "cost", "evidence"),
        "advice",
    }
    assert (finding["code"], finding["where"]) == ("GS208", "decoder.3.ffn.o.weight")


def test_the_json_holds_no_nan(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.event("GS105", data={"what": "x", "evidence": {"amax": float("nan")}})
    text = call("doctor", tmp_path / "run.gs", "--json").stdout
    [finding] = json.loads(text, parse_constant=pytest.fail)["findings"]
    assert finding["evidence"]["amax"] == "nan"


def test_findings_come_the_most_severe_first(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_loss())
    with RunWriter(tmp_path / "run.gs", resume=True) as writer:
        writer.event("GS105", step=1)
    data = json.loads(call("doctor", tmp_path / "run.gs", "--json").stdout)
    assert [finding["code"] for finding in data["findings"]] == ["GS203", "GS105"]


def test_the_text_has_location_and_advice(tmp_path):
    runs.write(tmp_path / "run.gs", runs.nan_gradients(), culprits=runs.sick_tensors)
    shown = call("doctor", tmp_path / "run.gs").stdout
    wanted = ["collapse", "GS208", "decoder.3.ffn.o.weight", "since", "try 1", "more"]
    assert [word for word in wanted if word not in shown] == []


@pytest.mark.parametrize("columns", [80, 46])
def test_a_screen_fits_the_terminal(tmp_path, columns):
    runs.write(tmp_path / "run.gs", runs.nan_gradients(), culprits=runs.sick_tensors)
    lines = call("doctor", tmp_path / "run.gs", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("command", ["doctor", "report", "tail"])
def test_a_text_log_is_refused_with_a_code(tmp_path, command):
    log = tmp_path / "train.log"
    log.write_text("step 1 loss scale 65536\n" * 100)
    done = call(command, log)
    assert done.exit_code == 3
    assert "GS306" in done.stderr
    assert "train.log" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["doctor", "report"])
def test_a_missing_file_is_refused_with_a_code(tmp_path, command):
    done = call(command, tmp_path / "none.gs")
    assert done.exit_code == 3
    assert "There is no file" in done.stderr
    assert "GS306" in done.stderr


def test_a_run_without_an_end_is_told(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        writer.flush()
        shown = call("doctor", tmp_path / "run.gs").stdout
    assert "still running, or killed" in " ".join(shown.split())


@pytest.mark.parametrize("command", [(), ("report",), ("explain",), ("run",)])
def test_the_help_has_no_type_for_flags(command):
    shown = call(*command, "--help", columns=120).stdout
    assert "--help" in shown
    assert "bool" not in shown.lower()


@pytest.mark.parametrize("command", ["report", "tail", "diff", "doctor"])
def test_the_help_has_examples(command):
    shown = call(command, "--help", columns=120).stdout
    assert shown.count(f"gradscale {command} ") >= 3
    assert "exit code" in shown
