"""Findings brought together with the places that instruments have named."""

from typing import Any

from gradscale.diagnosis.culprits import Culprits, Place
from gradscale.judge.advice import advice_for
from gradscale.judge.findings import Finding
from gradscale.judge.verdict_table import BY_CODE, Row


def with_place(finding: Finding, culprits: Culprits) -> Finding:
    """Return a finding with the place that an instrument named, if one did.

    The advice is given anew: what is known of a place is worth more than what would
    otherwise be tried.
    """
    row = BY_CODE.get(finding.code)
    if row is None or not row.located:
        return finding
    place = culprits.place(finding.since, _loss_finite(finding, row))
    if place is None:
        return finding
    evidence = {**finding.evidence, **_told(place)}
    where = place.module or ("" if place.tensor == "input" else finding.where)
    if row.named_by_tensor:
        where = finding.where or where
    advice = advice_for(finding.code, evidence)
    return finding._replace(where=where, evidence=evidence, advice=advice)


def _loss_finite(finding: Finding, row: Row) -> bool | None:
    """Return whether the loss was finite in the steps of a finding; None for either."""
    if row.loss_finite is None:
        return None
    return bool(finding.evidence.get("loss_finite", row.loss_finite))


def _told(place: Place) -> dict[str, Any]:
    return {
        "place": place.said,
        "place_step": place.step,
        "place_at": place.at,
        "place_module": place.module,
        "place_direction": place.direction,
        "place_operation": place.operation,
        "place_tensor": place.tensor,
        "place_kind": place.kind,
        "place_instead": place.instead,
    }
