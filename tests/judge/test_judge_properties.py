"""What holds for any run: no exception, a bounded state, one answer, no contradiction.

Runs are drawn as stretches of steps of one kind, so that rows get long enough to be
judged.
"""

import json
import math
import string
from dataclasses import asdict, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale import StepRecord
from gradscale.core.records import COLLAPSED_AFTER, LOST_TOO_MUCH, Verdict
from gradscale.judge.advice import ADVICE
from gradscale.judge.findings import Health
from gradscale.judge.judge import Judge
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


def judged(run, judge):
    return [judge.see(record, culprits) for record, culprits in run]


def state_of(judge):
    """Return all that a judge remembers, as nested dicts."""
    parts = vars(judge).items()
    return {name: asdict(part) if is_dataclass(part) else part for name, part in parts}


def leaves(value):
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [value]


@given(runs())
def test_every_run_is_judged_and_the_state_is_as_large_as_before(run):
    judge = Judge(tensors=3)
    size = len(leaves(state_of(judge)))
    judged(run, judge)
    judge.end()
    after = leaves(state_of(judge))
    assert len(after) == size
    assert {type(leaf) for leaf in after} <= {int, float, bool, str}


@given(runs())
def test_the_same_run_is_judged_the_same(run):
    assert judged(run, Judge()) == judged(run, Judge())


@given(KINDS)
def test_lines_are_few_however_many_steps_are_skipped(kind):
    run = stretch({**kind, "length": 300}, first=1)
    assert sum(len(judgement.findings) for judgement in judged(run, Judge())) <= 8


def contradictions(finding, record):
    """Return what a finding claims that its evidence, or its step, does not bear."""
    seen, advice = finding.evidence, " ".join(finding.advice)
    bearing = {
        "a loss that is finite": (
            finding.code != "GS203" or record.loss_finite == seen["over"]
        ),
        "gradients under a bad loss": finding.code != "GS208" or seen["loss_finite"],
        "too few bits": finding.code != "GS208" or seen["bits"] >= 8,
        "a scale above its floor": (
            finding.code != "GS202" or seen["floor_steps"] >= COLLAPSED_AFTER
        ),
        "sound weights": finding.code != "GS207" or not record.weights_finite,
        "a little lost": seen.get("lost", 1.0) >= LOST_TOO_MUCH,
        "a learning rate without growth": (
            "learning rate" not in advice
            or "loss_low" in seen
            or "loss_last" in seen
            or seen.get("gradients_grown_bits", 0.0) >= 3.0
            or finding.code == "GS207"
        ),
        "a rise that is none": (
            "The loss rose" not in advice
            or seen.get("loss_mean", math.inf) > seen.get("loss_low", 0.0)
        ),
        "a rise at once that is none": (
            "loss_last" not in seen or seen["loss_last"] >= 16.0 * seen["loss_start"]
        ),
        "a loss as lost as it was taken": (
            finding.code != "GS203" or 0 <= seen["applied"] <= seen["steps"]
        ),
        "a run lost whose steps were taken": (
            finding.code != "GS203"
            or not finding.hopeless
            or seen["steps"] - seen["applied"] >= 8
        ),
        "NaN that was not seen": "NaN under" not in advice or seen["nan"],
        "infinity where NaN was": "no NaN" not in advice or not seen["nan"],
        "a place that is everywhere": (
            "is local" not in advice or seen["culprits"] < seen["tensors"]
        ),
        "a tensor that was not named": not finding.where or "culprit" in seen,
        "a beginning after the end": finding.since <= finding.step,
        "nothing to try": bool(finding.advice) or finding.normal,
        "advice with holes": "{" not in advice,
        "a word without a command": finding.more == f"gradscale explain {finding.code}",
        "hope for what is mended": not (finding.hopeless and seen.get("over")),
    }
    return [claim for claim, holds in bearing.items() if not holds]


@given(runs())
def test_no_finding_contradicts_its_evidence(run):
    judge = Judge(tensors=3)
    for (record, _), judgement in zip(run, judged(run, judge), strict=True):
        for finding in judgement.findings:
            assert contradictions(finding, record) == []
            json.dumps(finding.as_dict(), allow_nan=False)


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
def test_the_findings_on_the_sick_runs_do_not_contradict_themselves(pattern):
    judge = Judge(tensors=50)
    found = []
    for record in pattern.records(True):
        culprits = () if record.finite else ("head.weight",)
        for finding in judge.see(record, culprits).findings:
            assert contradictions(finding, record) == []
            found.append(finding)
    wanted = Health.COLLAPSE if pattern.hopeless else Health.FINDINGS
    assert Health.of(found) is wanted


def test_a_contradiction_is_noticed():
    (pattern,) = [p for p in PATTERNS if p.sick == ("GS202",)]
    judge = Judge()
    for record in pattern.records(True):
        for finding in judge.see(record).findings:
            wrong = finding._replace(evidence={**finding.evidence, "floor_steps": 1})
            assert contradictions(wrong, record) == ["a scale above its floor"]


def test_advice_has_only_full_sentences_and_known_words():
    texts = [advice.text for code in ADVICE for advice in ADVICE[code]]
    # The safe form of a pattern is a sentence of its own.
    whole = (".", "{place_instead}")
    assert [text for text in texts if not text.endswith(whole)] == []
    names = {
        name for text in texts for _, name, _, _ in string.Formatter().parse(text)
    } - {None}
    assert names <= {
        *("bits", "culprit", "culprits", "fits", "gradients_grown_bits"),
        *("headroom_bits", "loss", "loss_low", "loss_mean", "of", "room", "scale"),
        *("scale_from", "since", "tensors", "usual_before", "applied", "steps"),
        *("loss_start", "loss_last", "place", "place_at", "place_step"),
        "place_instead",
    }
