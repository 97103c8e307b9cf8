"""The outcome of a step is read late, once, and field by field."""

import pytest

from gradscale import StepOutcome, StepRecord, Verdict

RECORD = StepRecord(
    step=7, scale=1024.0, applied=False, finite=False, amax=2.5, grad_norm=3.5
)


class Adam:
    pass


class Reads:
    """Counts how often the device is asked."""

    def __init__(self):
        self.records = 0
        self.culprits = 0

    def read_record(self):
        self.records += 1
        return RECORD

    def read_culprits(self):
        self.culprits += 1
        return ("layer.weight",)


@pytest.fixture
def reads():
    return Reads()


@pytest.fixture
def outcome(reads):
    return StepOutcome(reads.read_record, reads.read_culprits)


def test_making_an_outcome_reads_nothing(reads, outcome):
    assert (reads.records, reads.culprits) == (0, 0)


def test_all_fields_together_are_read_once(reads, outcome):
    assert (outcome.step, outcome.scale, outcome.applied) == (7, 1024.0, False)
    assert (outcome.amax, outcome.grad_norm) == (2.5, 3.5)
    assert outcome.verdict is Verdict.OVERFLOW
    assert reads.records == 1


def test_fields_are_read_without_the_culprits(reads, outcome):
    assert outcome.applied is False
    assert reads.culprits == 0


def test_culprits_are_read_without_the_fields(reads, outcome):
    assert outcome.culprits == ("layer.weight",)
    assert reads.records == 0


def test_the_record_is_a_plain_tuple_of_facts(outcome):
    assert outcome.record == RECORD


def test_a_norm_that_nobody_asked_for_is_none():
    record = RECORD._replace(grad_norm=None)
    assert StepOutcome(lambda: record, tuple).grad_norm is None


def test_an_outcome_says_in_one_line_what_became_of_the_step(outcome):
    assert repr(outcome) == (
        "StepOutcome(step=7, scale=1024, applied=False, verdict=overflow)"
    )


def test_an_optimizer_has_an_outcome_of_its_own(reads, outcome):
    adam = Adam()
    whole = StepOutcome(reads.read_record, reads.read_culprits, {id(adam): outcome})
    assert whole[adam] is outcome


def test_an_optimizer_that_took_no_part_is_named(outcome):
    with pytest.raises(KeyError) as error:
        outcome[Adam()]
    assert error.value.args == (
        "Adam took no part in step 7. Only optimizers whose unscale_() or step() ran "
        "before the last update() have an outcome. Call step(optimizer) first.",
    )


def test_outcomes_of_optimizers_are_read_on_their_own(reads, outcome):
    adam = Adam()
    whole = StepOutcome(lambda: RECORD._replace(step=8), tuple, {id(adam): outcome})
    assert whole.step == 8
    assert reads.records == 0
