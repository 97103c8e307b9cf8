"""What was said over a whole run, put together."""

from collections.abc import Iterable

from gradscale.judge.findings import Finding


def mended(findings: Iterable[Finding], well_at: int) -> list[Finding]:
    """Return findings of which none is hopeless if the run was well after it.

    Args:
        findings: What was said, in any order.
        well_at: The last step that ended ten finite ones in a row, `Judge.well_at`.
    """
    return [
        finding._replace(hopeless=False, evidence={**finding.evidence, "mended": True})
        if finding.hopeless and finding.step < well_at
        else finding
        for finding in findings
    ]


def folded(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for all of the same code and place, the others as they are.

    It is the last of them, or the last that is hopeless, began with the first, and
    says how often there was one: as counted, or as said.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.where), []).append(finding)
    return [_one(group) for group in groups.values()]


def _one(group: list[Finding]) -> Finding:
    if len(group) == 1:
        return group[0]
    hopeless = [finding for finding in group if finding.hopeless]
    steps = [finding.step for finding in group]
    said = max(finding.evidence.get("times", 1) for finding in group)
    gravest = (hopeless or group)[-1]
    times = max(len(group), said)
    first, last = min(steps), max(steps)
    since = min(finding.since for finding in group)
    counted = {"times": times, "first_step": first, "last_step": last}
    return gravest._replace(
        since=since,
        what=f"{gravest.what}; {times} times, said from step {first} to step {last}",
        evidence={**gravest.evidence, **counted},
    )
