"""Findings brought together with the places that instruments have named."""

from typing import Any

from gradscale.diagnosis.culprits import Culprits, Place
from gradscale.judge.advice import advice_for
from gradscale.judge.findings import Finding

# Findings that something was not finite, and so have such a place.
_PLACED = ("GS201", "GS202", "GS203", "GS205", "GS207", "GS208", "GS210")
# Of weights, the tensor says more than the module that has met them.
_NAMED_BY_TENSOR = ("GS207",)


def with_place(finding: Finding, culprits: Culprits) -> Finding:
    """Return a finding with the place that an instrument named, if one did.

    The advice is given anew: what is known of a place is worth more than what would
    otherwise be tried.
    """
    if finding.code not in _PLACED:
        return finding
    place = culprits.place(finding.since, _loss_finite(finding))
    if place is None:
        return finding
    evidence = {**finding.evidence, **_told(place)}
    where = place.module or ("" if place.tensor == "input" else finding.where)
    if finding.code in _NAMED_BY_TENSOR:
        where = finding.where or where
    advice = advice_for(finding.code, evidence)
    return finding._replace(where=where, evidence=evidence, advice=advice)


def _loss_finite(finding: Finding) -> bool | None:
    """Return whether the loss was finite in the steps of a finding; None for either."""
    if finding.code == "GS207":
        return None
    told = finding.evidence.get("loss_finite", finding.code != "GS203")
    return bool(told)


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
