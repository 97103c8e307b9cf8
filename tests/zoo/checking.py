"""Checks findings against the rows of the run file that they are about."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradscale.core.formatting import power
from gradscale.diagnosis.judged_run import JudgedRun
from gradscale.judge.findings import Finding
from gradscale.runfile import StepRow, open_run


def contradicted(finding: Finding, rows: Sequence[StepRow]) -> list[str]:
    """Return the claims of a finding that the rows up to its step contradict.

    Args:
        finding: As it was reported.
        rows: Of its run file, all of them.
    """
    seen = finding.evidence
    known = [row for row in rows if row.step <= finding.step]
    since = [row for row in known if row.step >= finding.since]
    lost = [row for row in since if not row.applied or row.verdict == "GS203"]
    before = [row for row in known if row.step < finding.since]
    scales = {power(row.scale) for row in known}
    claims = {
        "it began after it was reported": finding.since <= finding.step + 1,
        "it begins at a step that was taken": (
            "loss" not in seen or not since or since[0] in lost
        ),
        "more steps were lost than there are": (
            "of" not in seen or seen["steps"] <= len(lost)
        ),
        "steps were applied that were not": (
            seen.get("applied", 0) <= sum(row.applied for row in lost)
        ),
        "a step was taken before": (
            not seen.get("finite_before") or any(row.applied for row in known)
        ),
        "no step was taken before": (
            seen.get("finite_before") is not False
            or not any(row.applied and row.verdict != "GS203" for row in before)
        ),
        "the run recovered": not seen.get("recovered") or known[-1].applied,
        "a scale that no row has": (
            not known
            or {seen[name] for name in ("scale", "scale_from") if name in seen}
            <= scales
        ),
    }
    return [claim for claim, holds in claims.items() if not holds]


def rejudged(record: Path) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Return the findings that were recorded live, and those that the file gives.

    The file is judged row by row, each with what was known at that step: a finding
    that is equal is the one that a file cut off there gives.
    """
    with open_run(record) as run:
        live = [
            event.data
            for event in run.events()
            if isinstance(event.data, dict) and "evidence" in event.data
        ]
        judged = JudgedRun(run)
        judged.read_events()
        for row in run.steps():
            judged.see(row)
    return live, judged.findings


def as_recorded(finding: Finding) -> dict[str, Any]:
    """Return a finding as an event of a run file holds it."""
    return json.loads(json.dumps(finding.as_dict()))
