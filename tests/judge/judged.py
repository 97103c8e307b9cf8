"""Runs put through a judge, and what it says of them."""

import math

from gradscale.core.records import classify
from gradscale.judge.judge import Judge
from gradscale.judge.verdict_table import BY_VERDICT
from tests.judge.histories import dynamic


def findings_of(records, judge=None, culprits=()):
    judge = judge or Judge()
    found = []
    for record in records:
        names = () if record.finite else culprits
        found.extend(judge.see(record, names).findings)
    return [*found, *judge.end()]


def is_lost(record):
    return BY_VERDICT[classify(record)].skipped


def codes(findings):
    return tuple(finding.code for finding in findings)


def renumbered(records):
    return [record._replace(step=step) for step, record in enumerate(records, 1)]


def verdicts_of(records):
    judge = Judge()
    return [judge.see(record).verdict for record in records]


def falling(bits, nan, first=17.0):
    """Return 50 finite steps and a fall by so many bits at which nothing fits."""
    safe = [first] * 50 + [-math.inf] * (bits + 1)
    return [r._replace(nan=nan and not r.finite) for r in dynamic(safe)]
