"""TensorBoard: events can be read back by TensorBoard."""

import sys

import pytest

from gradscale.sinks import TensorBoardSink
from tests.sinks.records import feed

TAGS = {
    "gradscale/scale_log2",
    "gradscale/skipped_total",
    "gradscale/skip_rate_100",
    "gradscale/headroom_bits",
    "gradscale/grad_norm",
    "gradscale/underflow_frac",
}


class Writer:
    """Has the signatures of torch's and tensorboardX's writers."""

    def __init__(self):
        self.scalars, self.texts = [], []

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag, text_string, global_step=None, walltime=None):
        self.texts.append((tag, text_string, global_step))


def read(folder):
    """Return the events of a folder, read by TensorBoard."""
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed",
    )
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    return events


def test_every_metric_is_a_scalar_of_its_step():
    writer = Writer()
    feed(TensorBoardSink(writer))
    assert {tag for tag, _, _ in writer.scalars} == TAGS
    assert ("gradscale/scale_log2", 13.0, 4) in writer.scalars


def test_a_finding_is_a_text_of_its_step():
    writer = Writer()
    feed(TensorBoardSink(writer))
    [(tag, text, step)] = writer.texts
    assert (tag, step) == ("gradscale/findings", 14)
    assert text.startswith("    GS001 calibrated: S 2^16 -> 2^12 after 4 skips")


def test_names_may_have_another_prefix():
    writer = Writer()
    feed(TensorBoardSink(writer, prefix="amp/"), steps=1)
    assert {tag.split("/")[0] for tag, _, _ in writer.scalars} == {"amp"}


def test_events_of_torch_are_read_back(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    sink = TensorBoardSink.into(tmp_path)
    feed(sink)
    sink.close()
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == TAGS
    scales = [
        (seen.step, seen.value) for seen in events.Scalars("gradscale/scale_log2")
    ]
    assert scales[:6] == [(1, 16), (2, 15), (3, 14), (4, 13), (5, 12), (6, 12)]


def test_events_of_tensorboardx_are_read_back(tmp_path):
    library = pytest.importorskip("tensorboardX", reason="tensorboardX not installed")
    writer = library.SummaryWriter(str(tmp_path))
    feed(TensorBoardSink(writer))
    writer.close()
    assert set(read(tmp_path).Tags()["scalars"]) == TAGS


def test_a_missing_library_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoardSink.into(tmp_path)
