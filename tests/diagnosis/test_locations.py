"""Locations observed by module hooks become part of findings."""

import math

import pytest

from gradscale.runfile import RunWriter
from tests.diagnosis import runs
from tests.diagnosis.runs import diagnosed

PLACE = {
    "found": True,
    "direction": "backward",
    "module": "decoder.3.ffn",
    "module_class": "FeedForward",
    "operation": "log",
    "tensor": "grad_input",
    "kind": "inf",
    "count": 3,
    "elements": 4096,
    "pattern": {"name": "x", "what": "y", "instead": "Use log_softmax."},
}


def placed(path, step, **changed):
    """Write a run of NaN gradients from 100 on, in which an instrument saw a place."""
    runs.write(path, runs.nan_gradients(), culprits=runs.sick_tensors)
    with RunWriter(path, resume=True) as writer:
        writer.event("GS201", step=step, data={**PLACE, **changed})
    return diagnosed(path).findings[0]


def test_where_is_the_module_that_an_instrument_named(tmp_path):
    finding = placed(tmp_path / "run.gs", 104)
    assert finding.where == "decoder.3.ffn"
    said = "backward of decoder.3.ffn (FeedForward), log, grad_input: 3 of 4,096 inf"
    assert finding.evidence["place"] == said
    assert finding.advice[0] == (
        "Look at log in module 'decoder.3.ffn' (FeedForward). Use log_softmax."
    )


def test_a_place_is_named_for_programs_as_well(tmp_path):
    seen = placed(tmp_path / "run.gs", 104).evidence
    assert {name: seen[f"place_{name}"] for name in ("module", "kind", "tensor")} == {
        "module": "decoder.3.ffn",
        "kind": "inf",
        "tensor": "grad_input",
    }


def test_a_place_under_a_loss_that_is_not_finite_is_of_another_trouble(tmp_path):
    assert placed(tmp_path / "run.gs", 104, loss_finite=False).where == runs.SICK[0]
    assert placed(tmp_path / "b.gs", 104, loss_finite=True).where == "decoder.3.ffn"


@pytest.mark.parametrize(("module", "where"), [("head", "head"), (None, "the loss")])
def test_the_location_follows_from_the_module(tmp_path, module, where):
    assert placed(tmp_path / "run.gs", 104, module=module).where == where


def batch_of(path):
    """Write a run whose batches hold NaN from 100 on, and return what is found."""
    runs.write(path, runs.nan_loss(), culprits=runs.sick_tensors)
    batch = {"direction": "forward", "module": "", "module_class": "Model"}
    batch |= {"operation": "", "tensor": "input", "kind": "nan", "pattern": None}
    with RunWriter(path, resume=True) as writer:
        writer.event("GS203", step=106, data={**PLACE, **batch})
    return diagnosed(path).findings[0]


def test_a_batch_that_is_not_finite_is_said_to_be_the_place(tmp_path):
    finding = batch_of(tmp_path / "run.gs")
    assert (finding.code, finding.cause, finding.where) == (
        *("GS203", "bad-batch", "the batch"),
    )
    assert finding.evidence["place"].endswith("(Model), input: 3 of 4,096 NaN")
    assert finding.advice[0].startswith("The batch of step 106 contains NaN before")
    assert "  where  the batch\n" in finding.text()


def test_a_batch_that_is_not_finite_is_in_no_tensor(tmp_path):
    batch = {"direction": "forward", "module": "", "tensor": "input"}
    seen = {**batch, "loss_finite": True}
    assert placed(tmp_path / "run.gs", 104, **seen).where == "the batch"


def ruined(path, **event):
    """Write a run of which one weight is gone at 30, so that all gradients are NaN."""
    with RunWriter(path, meta={"parameters": ["a", "b", "c"]}) as writer:
        for step in range(1, 41):
            bad = step >= 30
            code, amax = ("GS207", math.nan) if bad else ("GS000", 1.0)
            writer.step(step, 1024.0, not bad, code, None, amax, 1.0)
        writer.peaks(30, {"a": math.nan, "b": math.nan, "c": math.nan})
        writer.event("GS207", step=30, data={"culprits": ["b"], "count": 1})
        if event:
            writer.event("GS203", step=34, data={**PLACE, **event})
    [finding] = diagnosed(path).findings
    return finding


def test_a_weight_that_is_not_finite_is_where_though_all_gradients_are_nan(tmp_path):
    finding = ruined(tmp_path / "run.gs")
    assert (finding.where, finding.evidence["culprits"]) == ("b", 1)


def test_a_weight_says_more_than_the_module_that_has_met_it(tmp_path):
    finding = ruined(tmp_path / "run.gs", module="block", direction="forward")
    assert (finding.code, finding.where) == ("GS207", "b")


def test_a_replay_that_found_nothing_names_no_place(tmp_path):
    assert placed(tmp_path / "run.gs", 104, found=False).where == runs.SICK[0]
