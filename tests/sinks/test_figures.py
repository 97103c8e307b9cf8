"""The metrics of a step, `CallableSink` and `LoggingSink`."""

import logging
import subprocess
import sys

import pytest

from gradscale import ConfigError, StepRecord
from gradscale.core.records import Verdict
from gradscale.judge.findings import Finding
from gradscale.judge.judge import Judge, Judgement
from gradscale.sinks import CallableSink, LoggingSink
from tests.sinks.records import feed


def metrics(every=1, steps=30):
    """Return the metrics of a run by step."""
    by_step = {}
    feed(CallableSink(by_step.__setitem__, every=every), steps=steps)
    return by_step


def test_a_healthy_step_has_all_metrics():
    assert metrics()[30] == {
        "scale_log2": 12.0,
        "skipped_total": 4,
        "skip_rate_100": 4 / 30,
        "headroom_bits": 5.0,
        "grad_norm": 0.5,
    }


def test_a_step_that_overflows_has_no_headroom_and_no_norm():
    assert metrics()[4] == {
        "scale_log2": 13.0,
        "skipped_total": 4,
        "skip_rate_100": 1.0,
    }


def test_a_sampled_step_has_the_share_that_is_lost():
    figures = metrics()
    assert figures[20]["underflow_frac"] == 0.125
    assert [step for step, seen in figures.items() if "underflow_frac" in seen] == [20]


def test_the_skip_rate_is_that_of_the_last_100_steps():
    figures = metrics(steps=104)
    rates = [figures[step]["skip_rate_100"] for step in (100, 101, 104)]
    assert rates == [0.04, 0.03, 0.0]


def test_steps_between_intervals_are_sent_if_their_verdict_is_not_ok():
    assert list(metrics(every=10)) == [1, 2, 3, 4, 10, 20, 30]


def test_steps_without_a_gradient_are_not_counted():
    judge, seen = Judge(), []
    sink = CallableSink(lambda step, figures: seen.append(figures["skip_rate_100"]))
    for step, read in enumerate((True, False, False), start=1):
        record = StepRecord(step, 4.0, read, True, read=read)
        sink.see(record, judge.see(record))
    assert seen == [0.0, 0.0, 0.0]


def test_an_invalid_interval_is_refused():
    with pytest.raises(ConfigError, match=r"every=0.*Pass 1"):
        CallableSink(print, every=0)


def test_importing_the_sinks_loads_no_library():
    script = (
        "import sys, gradscale.sinks\n"
        "print({'torch', 'tensorboard', 'tensorboardX', 'wandb'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


# --- logging --------------------------------------------------------------------------


def test_logging_has_a_line_with_the_metrics_every_interval(caplog):
    with caplog.at_level(logging.INFO, "gradscale"):
        feed(LoggingSink(every=15))
    line, last = [entry for entry in caplog.records if hasattr(entry, "figures")]
    assert line.getMessage().startswith("step 15 ok S=2^12 skipped_total=4 ")
    assert last.figures["grad_norm"] == 0.5


def test_logging_has_no_line_for_a_skip(caplog):
    with caplog.at_level(logging.INFO, "gradscale"):
        feed(LoggingSink(every=15), steps=4)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("code", "hopeless", "level"),
    [
        ("GS001", False, logging.INFO),
        ("GS201", False, logging.WARNING),
        ("GS202", True, logging.ERROR),
    ],
)
def test_a_finding_is_logged_at_its_level(caplog, code, hopeless, level):
    finding = Finding(code, "", "", 1, 1, "it happened", "", {}, (), "", hopeless)
    record = StepRecord(step=1, scale=4.0, applied=True, finite=True)
    logger = logging.getLogger("of the user")
    with caplog.at_level(logging.INFO, logger.name):
        LoggingSink(logger).see(record, Judgement(Verdict.OK, (finding,)))
    [entry] = caplog.records
    assert (entry.levelno, entry.name) == (level, "of the user")
    assert "it happened" in entry.getMessage()
