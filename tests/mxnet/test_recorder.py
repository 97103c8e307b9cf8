"""An MXNet run is recorded, and `report`, `doctor` and `tail` read it."""

import json

import mxnet as mx
import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.errors import ConfigError, HopelessRun, ScaleCollapsed
from gradscale.mxnet import FP16Trainer, Recorder, amp
from gradscale.runfile import open_run
from gradscale.sinks import CallableSink
from tests.mxnet.nets import INF, parameter, step, trainer_of

TRACE = [1.0, 1.0, INF, 1.0, 1.0]


def by_amp(recorder, trace=TRACE, **settings):
    trainer = trainer_of(parameter(devices=2))
    amp.init_loss_scaling(trainer, recorder=recorder, **settings)
    for factor in trace:
        step("gradscale", trainer, [1.0, factor])


def by_fp16_trainer(recorder, trace=TRACE, **settings):
    weight = parameter(devices=2)
    trainer = FP16Trainer(
        trainer_of(weight),
        loss_scaler_params={"init_scale": 2.0**16, **settings},
        recorder=recorder,
    )
    for factor in trace:
        with mx.autograd.record():
            first, second = weight.list_data()
            losses = [first.sum(), (second * factor).sum()]
        trainer.backward(losses)
        trainer.step(1)


each_way = pytest.mark.parametrize("run", [by_amp, by_fp16_trainer])


@each_way
def test_every_step_has_one_row_with_its_own_facts(tmp_path, run):
    with Recorder(tmp_path / "run.gs", quiet=True) as recorder:
        run(recorder)
    with open_run(tmp_path / "run.gs") as kept:
        rows = [(row.step, row.scale, row.applied) for row in kept.steps()]
        assert kept.meta["mxnet"] == mx.__version__
        assert kept.meta["parameters"] == ["weight@cpu(0)", "weight@cpu(1)"]
        assert kept.meta["policy"]["kind"] == "DynamicScale"
        assert [event.where for event in kept.events() if event.where] == [
            "weight@cpu(1)"
        ]
    scales = [2.0**16] * 3 + [2.0**15] * 2
    applied = [factor == 1.0 for factor in TRACE]
    assert rows == list(zip(range(1, 6), scales, applied, strict=True))


@pytest.mark.parametrize(
    ("command", "said"),
    [("report", "5 steps"), ("doctor", "5 steps"), ("tail", "step 5")],
)
def test_the_commands_read_it(tmp_path, command, said):
    path = tmp_path / "run.gs"
    with Recorder(path, quiet=True) as recorder:
        by_amp(recorder)
    done = CliRunner().invoke(app, [command, str(path)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert said in done.output


def test_a_cause_is_named(tmp_path):
    path = tmp_path / "run.gs"
    with Recorder(path, quiet=True) as recorder:
        by_amp(recorder, [1.0] * 20 + [INF] * 10)
    done = CliRunner().invoke(app, ["doctor", "--json", str(path)])
    codes = [finding["code"] for finding in json.loads(done.output)["findings"]]
    assert "GS203" in codes


def test_the_file_has_its_rows_after_a_collapse(tmp_path, capsys):
    with (
        pytest.raises(ScaleCollapsed) as raised,
        Recorder(tmp_path / "run.gs") as recorder,
    ):
        by_amp(recorder, [INF] * 9, init_scale=4.0, min_scale=1.0)
    # The finding is in the error alone.
    assert "GS202 step" in str(raised.value)
    assert "GS202" not in capsys.readouterr().err
    with open_run(tmp_path / "run.gs") as kept:
        assert len(list(kept.steps())) == 5


def test_a_guard_ends_a_run_that_no_scale_can_help(tmp_path):
    with (
        pytest.raises(HopelessRun),
        Recorder(tmp_path / "run.gs", guard="raise") as recorder,
    ):
        by_amp(recorder, [1.0] * 20 + [INF] * 100)


def test_an_unknown_guard_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="guard='stop'"):
        Recorder(tmp_path / "run.gs", guard="stop")


def test_sinks_receive_every_step():
    seen = []
    sink = CallableSink(
        lambda number, figures: seen.append((number, figures["scale_log2"]))
    )
    with Recorder(None, sinks=[sink], quiet=True) as recorder:
        by_amp(recorder)
    assert seen == [(1, 16.0), (2, 16.0), (3, 16.0), (4, 15.0), (5, 15.0)]


def test_the_worker_of_a_distributed_store_gives_the_rank(tmp_path):
    class Store:
        type, rank, num_workers = "dist_sync", 1, 2

    trainer = trainer_of(parameter())
    recorder = Recorder(tmp_path / "run.gs", quiet=True)
    amp.init_loss_scaling(trainer, recorder=recorder)
    trainer._kvstore = Store()
    assert recorder._process() == (1, 2, False)
