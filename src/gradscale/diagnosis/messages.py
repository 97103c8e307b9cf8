"""What a run file was told beside its steps."""

from collections import Counter
from collections.abc import Iterable, Mapping

from gradscale.judge.catalogue import BY_CODE
from gradscale.judge.findings import Finding
from gradscale.judge.verdict_table import SEVERITY, codes_where, is_normal
from gradscale.runfile import EventRow

# Findings that are always hopeless; a recorded one does not say.
_HOPELESS = codes_where(lambda row: row.hopeless)


def recorded(events: Iterable[EventRow], known: set[str]) -> list[Finding]:
    """Return a finding for each message of the run that the steps do not tell.

    Args:
        events: Of the run file.
        known: The codes that the steps do tell.
    """
    first: dict[str, EventRow] = {}
    times: Counter[str] = Counter()
    for event in events:
        if event.code in known or is_normal(event.code):
            continue
        # Of the codes that a judge gives, events also say who was not finite.
        told = isinstance(event.data, Mapping) and "what" in event.data
        if told or event.code not in SEVERITY:
            first.setdefault(event.code, event)
            times[event.code] += 1
    return [_message(event, times[code]) for code, event in first.items()]


def _message(event: EventRow, times: int) -> Finding:
    entry = BY_CODE.get(event.code)
    data = event.data if isinstance(event.data, Mapping) else {}
    evidence, advice = data.get("evidence"), data.get("advice")
    summary = entry.summary if entry else "a message that this version does not know"
    known = entry.advice if entry else ()
    seen = evidence if isinstance(evidence, Mapping) else {}
    return Finding(
        code=event.code,
        where=event.where or "",
        step=event.step or 0,
        since=event.step or 0,
        what=str(data.get("what") or summary),
        cost="",
        evidence={"times": times, **seen},
        advice=tuple(map(str, advice)) if isinstance(advice, list) else tuple(known),
        more=f"gradscale explain {event.code}",
        hopeless=event.code in _HOPELESS,
    )
