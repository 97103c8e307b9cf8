"""Findings from recorded events that do not come from the judge."""

from collections import Counter
from collections.abc import Iterable, Mapping

from gradscale.judge.catalogue import BY_CODE
from gradscale.judge.causes import BY_CODE as CAUSES
from gradscale.judge.causes import cause_of
from gradscale.judge.findings import Finding
from gradscale.judge.verdict_table import SEVERITY, codes_where, is_normal
from gradscale.runfile import EventRow

# A recorded finding does not state whether it is hopeless.
_HOPELESS = codes_where(lambda row: row.hopeless)


def recorded(events: Iterable[EventRow], known: set[str]) -> list[Finding]:
    """Return a finding for each recorded message that is not one of the judge.

    Args:
        events: All events of the run file.
        known: The codes of the findings of the judge.
    """
    first: dict[str, EventRow] = {}
    times: Counter[str] = Counter()
    for event in events:
        if event.code in known or is_normal(event.code):
            continue
        # Events with the codes of the judge may also list non-finite tensors.
        is_finding = isinstance(event.data, Mapping) and "what" in event.data
        if is_finding or event.code not in SEVERITY:
            first.setdefault(event.code, event)
            times[event.code] += 1
    return [_message(event, times[code]) for code, event in first.items()]


def _message(event: EventRow, times: int) -> Finding:
    entry = BY_CODE.get(event.code)
    data = event.data if isinstance(event.data, Mapping) else {}
    evidence, advice = data.get("evidence"), data.get("advice")
    summary = entry.summary if entry else "a message of a newer version of gradscale"
    known = entry.advice if entry else ()
    seen = dict(evidence) if isinstance(evidence, Mapping) else {}
    if not isinstance(seen.get("times"), int):
        seen["times"] = times
    return Finding(
        code=event.code,
        cause=cause_of(event.code, {}).name if event.code in CAUSES else "",
        where=event.where or "",
        step=event.step or 0,
        since=event.step or 0,
        what=str(data.get("what") or summary),
        cost="",
        evidence=seen,
        advice=tuple(map(str, advice)) if isinstance(advice, list) else tuple(known),
        more=f"gradscale explain {event.code}",
        hopeless=event.code in _HOPELESS,
    )
