"""W&B: metrics join the rows of the training and never advance its counter."""

import sys

import pytest

from gradscale.sinks import WandbSink
from tests.sinks.records import feed


class Run:
    """A fake W&B run: rows grow until they are committed.

    W&B is optional for development; if it is installed, the tests below use it offline.
    """

    def __init__(self):
        self.step, self.row, self.rows, self.defined = 0, {}, [], []

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, data, *, commit=None):
        self.row |= data
        if commit or commit is None:
            self.rows.append(self.row)
            self.row, self.step = {}, self.step + 1


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Return wandb, configured to write to a folder without network."""
    library = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return library


def test_metrics_have_a_step_axis_of_their_own():
    run = Run()
    WandbSink(run)
    assert run.defined == [
        ("gradscale/step", None),
        ("gradscale/*", "gradscale/step"),
    ]


def test_the_counter_of_the_run_is_not_advanced():
    run = Run()
    feed(WandbSink(run))
    assert (run.step, run.row["gradscale/step"]) == (0, 30)


def test_metrics_join_the_row_of_the_training():
    run = Run()
    sink = WandbSink(run)
    feed(sink)
    run.log({"loss": 1.5})
    [row] = run.rows
    assert (row["loss"], row["gradscale/scale_log2"]) == (1.5, 12.0)


def test_a_run_of_its_own_gets_a_row_for_each_step():
    run = Run()
    feed(WandbSink(run, commit=True))
    assert [row["gradscale/step"] for row in run.rows] == list(range(1, 31))
    assert run.rows[19]["gradscale/underflow_frac"] == 0.125


def test_a_finding_is_in_the_row_of_its_step():
    run = Run()
    feed(WandbSink(run, commit=True))
    [row] = [row for row in run.rows if "gradscale/finding" in row]
    assert row["gradscale/step"] == 14
    assert row["gradscale/finding"].startswith("GS001 calibrated")


def test_wandb_keeps_its_counter_and_takes_the_metrics(offline):
    run = offline.init(project="gradscale")
    feed(WandbSink(run))
    before = run.step
    run.log({"loss": 1.5})
    summary = dict(run.summary)
    run.finish()
    assert before == 0
    assert (summary["loss"], summary["gradscale/scale_log2"]) == (1.5, 12)


def test_wandb_starts_a_run_for_the_metrics_alone(offline):
    sink = WandbSink.start(project="gradscale")
    feed(sink)
    step = offline.run.step
    sink.finish()
    assert (step, offline.run) == (30, None)


def test_a_missing_library_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        WandbSink.start()
