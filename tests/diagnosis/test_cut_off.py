"""The findings of a file that is cut off at a step are those that were live then."""

import math

import pytest

from gradscale import StepRecord
from gradscale.diagnosis.following import Follower
from gradscale.judge.finding_builders import Reported
from gradscale.judge.findings import by_severity, clear_recovered, merge_repeats
from gradscale.recording.recorded_run import RecordedRun
from gradscale.recording.recorder import Recorder
from gradscale.runfile import open_run
from tests.diagnosis.runs import diagnosed
from tests.judge.histories import dynamic

PLACE = {
    "found": True,
    "direction": "forward",
    "module": "head",
    "operation": "log",
    "tensor": "output",
    "kind": "nan",
    "loss_finite": False,
}
WEIGHTS = {
    "observed": "weights",
    "peak": 900.0,
    "first_peak": 0.5,
    "largest": "head.weight",
    "rates": [30.0],
    "beyond_rate": False,
    "buffer": "",
}
LOOP = {"observed": "loop", "looks": 6, "uncleared": 6, "scale": 65536.0}


class Live:
    """A recorded run, and the diagnosis of its own judge."""

    def __init__(self, path):
        recorder = Recorder(path, quiet=True)
        self.run, self.reported = RecordedRun(recorder=recorder), Reported()

    def record(self, record, culprits=(), observations=()):
        """Record a step; each observation comes with its own step."""
        for step, data in observations:
            self.run.observe(step, data)
        found = self.run.record_step(record, culprits).findings
        self.reported.add(found, self.run.judge.episode)

    def diagnosis(self):
        judge = self.run.judge
        found = [*map(judge.up_to_now, self.reported.up_to_now()), *judge.end()]
        return by_severity(merge_repeats(clear_recovered(found, judge.healthy_at)))


def nan_loss():
    """Yield 30 finite steps, then a NaN loss: a location, then older evidence."""
    losses = [2.0] * 30 + [math.nan] * 20 + [2.0] * 20
    observed = {8: [(8, LOOP)], 34: [(36, PLACE)], 35: [(35, WEIGHTS)]}
    for record in dynamic([20.0] * len(losses), losses=losses):
        yield record, (), observed.get(record.step, [])


def nan_gradients():
    """Yield a run whose gradients are NaN every tenth step, then in all steps."""
    safe = [31.0 if n % 10 else -math.inf for n in range(1, 61)] + [-math.inf] * 15
    place = {**PLACE, "direction": "backward", "loss_finite": True}
    observed = {22: [(22, {"observed": "setup", "float16_params": 3})]}
    observed |= {66: [(68, place)]}
    for record in dynamic(safe):
        bad = record._replace(nan=True, amax=math.nan)
        culprits = () if record.finite else ("head.weight",)
        yield (
            record if record.finite else bad,
            culprits,
            observed.get(record.step, []),
        )


def without_gradients():
    """Yield idle steps, whose gradients were cleared early."""
    cleared = {"observed": "loop", "looks": 3, "cleared_early": 3, "scale": 8.0}
    for step in range(1, 21):
        record = StepRecord(step, 8.0, False, True, read=False)
        yield record, (), [(step, cleared)] if step == 4 else []


RUNS = {run.__name__: run for run in (nan_loss, nan_gradients, without_gradients)}


@pytest.mark.parametrize("name", RUNS)
def test_a_file_that_is_followed_has_the_findings_of_the_live_run(tmp_path, name):
    live, codes = Live(tmp_path / "run.gs"), set()
    live.run.begin()
    with open_run(tmp_path / "run.gs") as run:
        follower = Follower(run)
        for step in RUNS[name]():
            live.record(*step)
            live.run.recorder.writer.flush()
            follower.poll()
            assert follower.findings == live.diagnosis()
            codes |= {finding.code for finding in follower.findings}
    live.run.close()
    assert len(codes) >= 2


@pytest.mark.parametrize("cut", [8, 34, 35, 36, 38, 40, 50, 60, 70])
def test_a_file_that_is_cut_off_has_the_findings_of_the_live_run(tmp_path, cut):
    live = Live(tmp_path / "run.gs")
    for record, culprits, observations in nan_loss():
        if record.step <= cut:
            live.record(record, culprits, observations)
    told = live.diagnosis()
    live.run.close()
    assert list(diagnosed(tmp_path / "run.gs").findings) == told
    assert told != []


def test_the_texts_are_those_that_were_printed(tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(
        RecordedRun, "report", lambda run, text, **how: printed.append(text)
    )
    live = Live(tmp_path / "run.gs")
    for record, culprits, observations in nan_loss():
        # The file ends with the step of the first one; the end reports another.
        if not printed:
            live.record(record, culprits, observations)
    live.run.close()
    texts = [finding.text() for finding in diagnosed(tmp_path / "run.gs").findings]
    assert sorted(texts) == sorted(printed)
    assert len(texts) == 2


def test_the_cost_of_an_episode_grows_after_its_finding(tmp_path):
    live = Live(tmp_path / "run.gs")
    for step in nan_loss():
        live.record(*step)
    live.run.close()
    [loss] = [f for f in diagnosed(tmp_path / "run.gs").findings if f.code == "GS203"]
    # Ten steps in a row make the finding, and there are twenty.
    assert loss.cost == "20 batches lost"
    assert loss.evidence["steps"] < 20
