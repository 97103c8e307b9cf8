"""Console output: wrapped on a terminal, clear of bars, never doubled, silenced."""

import fcntl
import io
import logging
import os
import struct
import sys
import termios
from types import SimpleNamespace

import pytest

from gradscale.recording.console import say, wrapped

FINDING = """\
GS203 step 38: the loss is nan before scaling, 8 steps in a row; the scale was halved
  where  the batch
  try 1  The batch of step 36 holds NaN before the model has seen it: look at the data
  more   gradscale explain GS203"""


@pytest.fixture
def no_log_handlers(monkeypatch):
    """Texts go to stderr, though pytest sets log handlers of its own."""
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: False)


def terminal(columns):
    """Return a terminal of a width: the stream to write to, and a reading function."""
    outside, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    stream = open(inside, "w", encoding="utf-8")  # noqa: SIM115  # closed by `read`

    def read():
        stream.flush()
        shown = os.read(outside, 65536).decode()
        stream.close()
        os.close(outside)
        return shown.replace("\r\n", "\n")

    return stream, read


@pytest.mark.usefixtures("no_log_handlers")
@pytest.mark.parametrize("columns", [44, 80])
def test_on_a_terminal_lines_are_broken_at_blanks_under_their_column(
    monkeypatch, columns
):
    stream, read = terminal(columns)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    say(FINDING, rank=0)
    shown = read()
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert shown.split() == f"gradscale {FINDING}".split()
    start = next(n for n, line in enumerate(lines) if line.startswith("  try 1  "))
    assert lines[start + 1].startswith(" " * 9)
    assert lines[start + 1][9] != " "


def test_a_word_that_is_too_long_is_kept_whole():
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"
    assert wrapped(f"  where  {name}", 44).splitlines()[-1].strip() == name


def test_a_command_is_not_broken():
    shown = wrapped("gradscale: 60 steps. Next: gradscale doctor run.gs", 40)
    assert shown.splitlines()[1].strip() == "gradscale doctor run.gs"


@pytest.mark.usefixtures("no_log_handlers")
def test_in_a_pipe_lines_are_never_broken(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    say(FINDING, rank=0)
    assert capsys.readouterr().err == f"gradscale {FINDING}\n"


@pytest.mark.usefixtures("no_log_handlers")
def test_text_is_written_through_tqdm_if_it_is_loaded(monkeypatch, capsys):
    written = []

    def write(text, file):
        written.append((text, file is sys.stderr))

    bars = SimpleNamespace(tqdm=SimpleNamespace(write=write))
    monkeypatch.setitem(sys.modules, "tqdm", bars)
    say(FINDING, rank=0)
    assert written == [(f"gradscale {FINDING}", True)]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("no_log_handlers")
def test_a_stream_that_can_only_write_is_enough(monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append))
    say(FINDING, rank=0)
    assert "".join(written) == f"gradscale {FINDING}\n"


@pytest.mark.usefixtures("no_log_handlers")
def test_a_closed_stream_does_not_raise(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    say(FINDING, rank=0)


@pytest.mark.usefixtures("no_log_handlers")
def test_text_without_a_code_follows_a_colon(capsys):
    say("run.gs exists", rank=0)
    assert capsys.readouterr().err == "gradscale: run.gs exists\n"


def test_a_text_that_is_logged_is_not_printed_too(caplog, capsys):
    with caplog.at_level(logging.INFO, "gradscale"):
        say(FINDING, rank=0)
    assert [record.getMessage() for record in caplog.records] == [FINDING]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("handlers", [True, False])
def test_gradscale_quiet_silences_console_and_log(
    monkeypatch, caplog, capsys, handlers
):
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: handlers)
    monkeypatch.setenv("GRADSCALE_QUIET", "1")
    say(FINDING, rank=0)
    assert (caplog.records, capsys.readouterr().err) == ([], "")


@pytest.mark.usefixtures("no_log_handlers")
@pytest.mark.parametrize("value", ["", "0"])
def test_gradscale_quiet_set_to_nothing_or_0_silences_nothing(
    monkeypatch, capsys, value
):
    monkeypatch.setenv("GRADSCALE_QUIET", value)
    say(FINDING, rank=0)
    assert capsys.readouterr().err
