"""`GradScaler(record=...)`: what the constructor settles, and what is in the file."""

import logging
import math

import pytest
import torch

from gradscale import HopelessRun, ScaleCollapsed, StateError
from gradscale.recording.recorder import Recorder
from gradscale.runfile import open_run
from gradscale.sinks import CallableSink
from gradscale.torch import GradScaler
from tests.torch.training import INF, iterate, parameter, planted

FLOOR = 2.0**-24


@pytest.fixture(autouse=True)
def _no_log_handlers(monkeypatch):
    """Messages go to stderr, though pytest sets log handlers of its own."""
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: False)


def trained(scaler, steps=5, grad=1.0):
    """Take steps and close the run file; return the weight."""
    param = parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    for _ in range(steps):
        iterate(scaler, optimizer, param, grad)
    scaler.close()
    return param.tolist()


def steps_of(path):
    with open_run(path) as run:
        return [row.step for row in run.steps()]


def test_a_missing_folder_is_refused_by_the_constructor(tmp_path):
    with pytest.raises(StateError, match=r"none does not exist.*GS308"):
        GradScaler("cpu", record=tmp_path / "none" / "run.gs")


def test_the_same_script_twice_writes_two_files(tmp_path, capsys):
    for steps in (5, 3):
        trained(GradScaler("cpu", record=tmp_path / "run.gs"), steps)
    assert steps_of(tmp_path / "run.gs") == [1, 2, 3, 4, 5]
    assert steps_of(tmp_path / "run.2.gs") == [1, 2, 3]
    assert "recorded in run.2.gs" in capsys.readouterr().err


def test_a_folder_that_vanishes_before_the_first_step_stops_no_update(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    scaler = GradScaler("cpu", record=tmp_path / "in" / "run.gs")
    (tmp_path / "in").rmdir()
    assert trained(scaler) == [-5.0, -5.0]
    assert capsys.readouterr().err.count("GS308") == 1


def test_a_change_of_directory_does_not_move_the_file(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    scaler = GradScaler("cpu", record="run.gs")
    monkeypatch.chdir(tmp_path / "in")
    trained(scaler)
    assert steps_of(tmp_path / "run.gs") == [1, 2, 3, 4, 5]
    assert list((tmp_path / "in").iterdir()) == []


def test_a_disabled_scaler_reports_that_nothing_is_recorded(tmp_path, capsys):
    record = tmp_path / "none" / "run.gs"
    trained(GradScaler("cpu", enabled=False, record=record))
    assert "disabled, so no run file is written" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [str, Recorder])
def test_a_recorder_knows_policy_and_parameters_like_a_path(tmp_path, kind):
    model = torch.nn.Linear(2, 1)
    record = kind(str(tmp_path / "run.gs"))
    scaler = GradScaler("cpu", growth_interval=7, model=model, record=record)
    trained(scaler)
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["policy"]["growth_interval"] == 7
        assert run.meta["parameters"] == ["weight", "bias"]


def test_a_sink_that_raises_stops_no_update(capsys):
    def send(step, figures):
        raise ConnectionError("no server")

    assert trained(GradScaler("cpu", sinks=[CallableSink(send)])) == [-5.0, -5.0]
    assert capsys.readouterr().err.count("no server") == 1


def until_it_raises(error, scaler, loss_of, params):
    """Train until an error is raised; return it and the number of updates."""
    optimizer = torch.optim.SGD(params, lr=1.0)
    for update in range(1, 51):
        optimizer.zero_grad()
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        try:
            scaler.update()
        except error as raised:
            return raised, update
    pytest.fail("It did not raise.")


def test_the_rows_up_to_a_collapse_are_in_the_file(tmp_path):
    scaler = GradScaler("cpu", init_scale=FLOOR, record=tmp_path / "run.gs")
    param = parameter(2)
    _, updates = until_it_raises(
        ScaleCollapsed, scaler, lambda: planted(param, INF), [param]
    )
    # The run goes on, and does not raise again for the rows before.
    iterate(scaler, torch.optim.SGD([param], lr=1.0), param, 1.0)
    scaler.close()
    assert steps_of(tmp_path / "run.gs") == list(range(1, updates + 2))


def test_the_rows_up_to_a_hopeless_run_are_in_the_file(tmp_path):
    scaler = GradScaler("cpu", guard="raise", record=tmp_path / "run.gs")
    param = parameter(2)
    _, updates = until_it_raises(
        HopelessRun, scaler, lambda: planted(param, math.nan) + math.nan, [param]
    )
    scaler.close()
    assert steps_of(tmp_path / "run.gs") == list(range(1, updates + 1))


@pytest.mark.parametrize("guard", ["report", "raise"])
def test_the_finding_of_a_collapse_is_in_the_error_and_not_printed(
    tmp_path, monkeypatch, capsys, guard
):
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: False)
    # For the bundle.
    monkeypatch.chdir(tmp_path)
    param = parameter(2)
    error, _ = until_it_raises(
        ScaleCollapsed,
        GradScaler("cpu", init_scale=FLOOR, guard=guard),
        lambda: planted(param, INF),
        [param],
    )
    message, finding, *rows = str(error).splitlines()
    assert message.startswith("The scale has fallen to its floor")
    assert finding.startswith("GS202 step 3: ")
    assert ("bundle" in rows[-1]) == (guard == "raise")
    assert "GS202" not in capsys.readouterr().err


def test_the_error_of_a_collapse_names_parameters_as_the_findings_do():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    error, _ = until_it_raises(
        ScaleCollapsed,
        GradScaler("cpu", init_scale=FLOOR),
        lambda: sum(planted(param, INF) for param in model.parameters()),
        model.parameters(),
    )
    assert "Not finite: 0.bias, 0.weight." in str(error)
