"""What holds for any run: no exception, a bounded state, one answer, no contradiction.

Runs are drawn as stretches of steps of one kind, so that rows get long enough to be
judged.
"""

import json
import math
from dataclasses import asdict, fields, is_dataclass
from itertools import filterfalse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale import StepRecord
from gradscale.core.records import COLLAPSED_AFTER, LOST_TOO_MUCH, Verdict
from gradscale.judge.findings import Health
from gradscale.judge.history import Episode
from gradscale.judge.judge import Judge
from gradscale.judge.observations import MISUSES
from gradscale.judge.phrases import _PHRASES, is_silent
from tests.judge.judged import is_lost
from tests.judge.sick_runs import PATTERNS

FLAGS = ("applied", "finite", "loss_finite", "norm_finite", "read", "calibrated")
FLAGS += ("grown", "scaled_loss_finite", "weights_finite", "nan")
# Most flags are as in a healthy run, so that trouble comes alone as well as mixed.
USUALLY = {"grown": False, "nan": False}
KINDS = st.fixed_dictionaries(
    {
        "fields": st.fixed_dictionaries(
            {
                name: st.sampled_from([USUALLY.get(name, True)] * 4 + [None])
                for name in FLAGS
            }
        ),
        "exponent": st.integers(-30, 40),
        "move": st.sampled_from([-1, -1, 0, 0, 1]),
        "floor_steps": st.sampled_from([0] * 5 + [3]),
        "amax": st.sampled_from([0.0, 2.0**-20, 1.0, 40_000.0, math.inf, math.nan]),
        "grad_norm": st.sampled_from([None, 0.0, 1.0, math.inf]),
        "loss": st.sampled_from([None, 0.0, 1.0, 9.0, -1.0, math.inf, math.nan]),
        "lost": st.sampled_from([None, 0.0, 0.3]),
        "culprits": st.sampled_from([(), ("a",), ("a", "b"), ("a", "b", "c")]),
        "length": st.sampled_from([1, 2, 8, 12, 30, 120]),
    }
)


def stretch(kind, first):
    """Return steps of one kind, each with its culprits."""
    # None means the flag's rarer value.
    flags = {
        name: not USUALLY.get(name, True) if value is None else value
        for name, value in kind["fields"].items()
    }
    same = {name: kind[name] for name in ("floor_steps", "amax", "grad_norm", "loss")}
    logs = (kind["exponent"] + kind["move"] * step for step in range(kind["length"]))
    records = (
        StepRecord(
            step=first + index,
            scale=2.0 ** max(-140, min(127, log)),
            lost=kind["lost"],
            **same,
            **flags,
        )
        for index, log in enumerate(logs)
    )
    return [(record, kind["culprits"]) for record in records]


@st.composite
def runs(draw):
    """Draw a run: records in order, each with its culprits."""
    run = []
    for kind in draw(st.lists(KINDS, min_size=1, max_size=6)):
        run += stretch(kind, first=len(run) + 1)
    return run


# Observations of a run, by the step in which each arrives.
PLACE = {"found": True, "module": "head", "kind": "nan", "tensor": "output"}
OBSERVATIONS = st.lists(
    st.sampled_from(
        [
            {**PLACE, "direction": "forward", "loss_finite": False},
            {**PLACE, "direction": "backward", "loss_finite": True},
            {**PLACE, "direction": "forward", "module": "", "tensor": "input"},
            {"observed": "loop", "looks": 6, "uncleared": 6},
            {"observed": "loop", "looks": 6, "direct_steps": 2},
            {"observed": "setup", "float16_params": 2},
            {"observed": "weights", "first_peak": 1.0, "peak": 9.0, "rates": [0.1]},
            {"observed": "weights", "buffer": "bn.running_mean"},
            {"observed": "scaler", "same_optimizer": True},
        ]
    ).flatmap(lambda data: st.integers(1, 60).map(lambda step: (step, data))),
    max_size=4,
    unique_by=lambda event: event[0],
)


def observing(events, judge):
    """Let a judge have all observations of a run."""
    for step, data in events:
        judge.observe(step, data)
    return judge


def judged(run, judge):
    return [judge.see(record, culprits) for record, culprits in run]


def state_of(judge):
    """Return all that a judge remembers, as nested containers."""
    parts = vars(judge).items()
    return {
        name: asdict(part) if is_dataclass(part) else part
        for name, part in parts
        # Observations of steps that were not judged yet.
        if name != "_early"
    }


def leaves(value):
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    if isinstance(value, (list, tuple, set)):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value]


# Of a judge with two episodes, all findings reported and four locations.
LARGEST_STATE = 250


@given(runs(), OBSERVATIONS)
def test_every_run_is_judged_and_the_state_stays_small(run, events):
    judge = observing(events, Judge(tensors=3))
    judged(run, judge)
    judge.end()
    after = leaves(state_of(judge))
    assert len(after) <= LARGEST_STATE
    assert {type(leaf) for leaf in after} <= {int, float, bool, str, type(None)}


@given(KINDS, OBSERVATIONS)
def test_the_state_is_as_large_after_600_steps_of_a_kind_as_after_300(kind, events):
    judge = observing(events, Judge(tensors=3))
    judged(stretch({**kind, "length": 300}, first=1), judge)
    size = len(leaves(state_of(judge)))
    judged(stretch({**kind, "length": 300}, first=301), judge)
    # An episode may have begun or ended.
    assert len(leaves(state_of(judge))) - size <= len(fields(Episode))


@given(runs(), OBSERVATIONS)
def test_the_end_of_a_run_may_be_asked_for_at_any_step(run, events):
    judge, asked = observing(events, Judge()), observing(events, Judge())
    for record, culprits in run:
        assert judge.see(record, culprits) == asked.see(record, culprits)
        asked.end()


@given(runs(), OBSERVATIONS)
def test_the_order_in_which_observations_arrive_is_of_no_account(run, events):
    there, here = observing(events, Judge()), observing(events[::-1], Judge())
    assert judged(run, there) == judged(run, here)


@given(KINDS)
def test_lines_are_few_however_many_steps_are_skipped(kind):
    run = stretch({**kind, "length": 300}, first=1)
    assert sum(len(judgement.findings) for judgement in judged(run, Judge())) <= 8


# Evidence that is printed in words, or elsewhere in a finding.
WORDED = frozenset[str]().union(*(names for names, _ in _PHRASES))


def contradictions(finding, records):
    """Return what a finding claims that its evidence, or the records, do not bear.

    Args:
        finding: As the judge gave it.
        records: All steps up to its own.
    """
    seen, advice, code = finding.evidence, " ".join(finding.advice), finding.code
    last, within = records[-1], records[finding.since - 1 :]
    lost = [record for record in within if record.read and is_lost(record)]
    taken = [r for r in records if r.read and r.applied and not is_lost(r)]
    episode = code in ("GS202", "GS203", "GS208", "GS211")
    bearing = {
        "a loss that was finite": (
            "loss" not in seen or any(not record.loss_finite for record in lost)
        ),
        "gradients under a bad loss": code != "GS208" or "loss" not in seen,
        "too few bits": code != "GS208" or seen["bits"] >= 8,
        "a fall that was none": (
            code != "GS211"
            or seen["bits"]
            == exponent_of(seen["scale_from"]) - exponent_of(seen["scale"])
        ),
        "a scale above its floor": (
            code != "GS202" or seen["floor_steps"] >= COLLAPSED_AFTER
        ),
        "sound weights": code != "GS207" or not last.weights_finite,
        "a little lost": seen.get("lost", 1.0) >= LOST_TOO_MUCH,
        "a learning rate without growth": (
            finding.cause != "learning-rate"
            or {"loss_low", "loss_last", "weight_to"} & set(seen)
        ),
        "a rise that is none": seen.get("loss_mean", 1e9) > seen.get("loss_low", 0.0),
        "a rise at once that is none": (
            "loss_last" not in seen or seen["loss_last"] >= 16.0 * seen["loss_start"]
        ),
        "more lost steps than there were": (not episode or seen["steps"] <= len(lost)),
        "more applied steps than were lost": (
            not episode or 0 <= seen["applied"] <= seen["steps"]
        ),
        "a beginning that was no lost step": not episode or within[0] == lost[0],
        "a step taken before": (not episode or seen["finite_before"] == bool(taken)),
        "a run lost too early": (
            code != "GS203"
            or not finding.hopeless
            or seen["steps"] - seen["applied"] >= 8
        ),
        "a recovery without finite steps": (
            not seen.get("recovered") or not any(map(is_lost, records[-5:]))
        ),
        "hope for what is mended": not (finding.hopeless and seen.get("recovered")),
        "usual values after the beginning": (
            seen.get("usual_before", 0) <= finding.since
        ),
        "infinity where NaN was": "no NaN" not in advice or not seen["nan"],
        # The end of a run may be observed after its last step.
        "a beginning after the end": (
            finding.step == last.step
            and (finding.since <= finding.step or code in MISUSES)
        ),
        "nothing to try": bool(finding.advice) or finding.normal,
        "text with holes": "{" not in advice + finding.what,
        "evidence without words": set(filterfalse(is_silent, seen)) <= WORDED,
        "a word without a command": finding.more == f"gradscale explain {code}",
    }
    return [claim for claim, holds in bearing.items() if not holds]


def exponent_of(power):
    """Return the exponent of a scale as it is printed."""
    return float(power.removeprefix("2^"))


@given(runs(), OBSERVATIONS)
def test_no_finding_contradicts_the_records(run, events):
    judge = observing(events, Judge(tensors=3))
    records = [record for record, _ in run]
    for step, judgement in enumerate(judged(run, judge), start=1):
        for finding in judgement.findings:
            assert contradictions(finding, records[:step]) == []
            json.dumps(finding.as_dict(), allow_nan=False)
    for finding in judge.end():
        assert contradictions(finding, records) == []


@given(runs())
def test_a_step_that_is_not_finite_throughout_is_never_ok(run):
    for (record, _), judgement in zip(run, judged(run, Judge()), strict=True):
        well = record.finite and record.loss_finite and record.norm_finite
        if judgement.verdict in (Verdict.OK, Verdict.UNDERFLOW):
            assert well
            assert record.weights_finite


@pytest.mark.parametrize(
    "pattern", PATTERNS, ids=lambda pattern: pattern.records.__name__
)
def test_the_findings_on_the_sick_runs_do_not_contradict_their_records(pattern):
    judge = Judge(tensors=50)
    found, records = [], []
    for record in pattern.records(True):
        records.append(record)
        culprits = () if record.finite else ("head.weight",)
        for finding in judge.see(record, culprits).findings:
            assert contradictions(finding, records) == []
            found.append(finding)
    wanted = Health.COLLAPSE if pattern.hopeless else Health.FINDINGS
    assert Health.of(found) is wanted


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"floor_steps": 1}, "a scale above its floor"),
        ({"steps": 99}, "more lost steps than there were"),
        ({"finite_before": False}, "a step taken before"),
        ({"loss": "nan"}, "a loss that was finite"),
    ],
)
def test_a_contradiction_is_noticed(change, claim):
    (pattern,) = [p for p in PATTERNS if p.sick == ("GS202",)]
    judge, records = Judge(), []
    for record in pattern.records(True):
        records.append(record)
        for finding in judge.see(record).findings:
            wrong = finding._replace(evidence={**finding.evidence, **change})
            assert contradictions(wrong, records) == [claim]
