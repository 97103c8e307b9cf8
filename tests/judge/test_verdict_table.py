"""The table has one row for each verdict and agrees with the catalogue."""

import pytest

from gradscale import StepRecord, Verdict, classify
from gradscale.judge.catalogue import BY_CODE as ENTRIES
from gradscale.judge.verdict_table import (
    BY_VERDICT,
    SEVERITY,
    TABLE,
    Skip,
    codes_where,
    verdicts_where,
)

BAD = StepRecord(step=9, scale=8.0, applied=False, finite=False)


def test_every_verdict_has_one_row_with_its_code():
    rows = [row.verdict for row in TABLE if row.verdict is not None]
    assert sorted(rows, key=list(Verdict).index) == list(Verdict)
    assert {row.code for row in BY_VERDICT.values()} == {each.code for each in Verdict}


def test_every_row_has_a_code_of_its_own_in_the_catalogue():
    codes = [row.code for row in TABLE]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= set(ENTRIES)


def test_normal_codes_come_last_and_have_no_severity():
    assert [row.normal for row in TABLE] == sorted(row.normal for row in TABLE)
    assert codes_where(lambda row: not row.normal) == SEVERITY


def test_every_verdict_has_a_rank_and_a_letter_of_its_own():
    looks = [row.look for row in BY_VERDICT.values()]
    assert sorted(look.rank for look in looks) == list(range(len(looks)))
    assert len({look.letter for look in looks}) == len(looks)


@pytest.mark.parametrize(
    "verdict", verdicts_where(lambda row: row.skip is Skip.CAUSE), ids=str
)
def test_the_implied_fields_of_a_skip_make_its_verdict(verdict):
    assert classify(BAD._replace(**BY_VERDICT[verdict].implies)) is verdict


def test_a_hopeless_verdict_is_a_skip():
    hopeless = verdicts_where(lambda row: row.hopeless)
    assert hopeless
    assert all(BY_VERDICT[verdict].skipped for verdict in hopeless)
