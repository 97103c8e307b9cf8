"""Findings about a run: text, JSON, order of severity, merging."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from gradscale.core.formatting import printable
from gradscale.judge.phrases import in_words
from gradscale.judge.verdict_table import BY_CODE, SEVERITY, Row, is_normal

# Codes without a row come after those that have one.
_RANK = {code: rank for rank, code in enumerate(SEVERITY)}
_OTHER = Row(code="")


class Finding(NamedTuple):
    """One problem or event of a run, reported once per phase, not once per skip.

    >>> finding = Finding(
    ...     code="GS206", cause="loss-overflow", where="", step=7, since=7,
    ...     what="the scaled loss overflowed", cost="1 batch lost",
    ...     evidence={"scale": "2^16"}, advice=("loss.float()",),
    ...     more="gradscale explain GS206",
    ... )
    >>> print(finding.text())
    GS206 step 7: the scaled loss overflowed
      where  the loss
      since  step 7
      seen   S = 2^16
      cost   1 batch lost
      try 1  loss.float()
      more   gradscale explain GS206

    Attributes:
        code: Its entry in the catalogue.
        cause: The cause in kebab case, a row of `gradscale.judge.causes`; empty if the
            evidence shows none.
        where: The parameter or module, named as in `named_modules()`, or another
            location in words; empty if unknown.
        step: The step at which it was found.
        since: The step at which it began.
        what: One sentence without a full stop.
        cost: The cost to the run; empty if there is none.
        evidence: Numbers, strings and booleans by name.
        advice: Remedies, in the order in which to try them.
        more: The command that prints the page of the code.
        hopeless: No scale can help, and the run will not recover by itself.
    """

    code: str
    cause: str
    where: str
    step: int
    since: int
    what: str
    cost: str
    evidence: Mapping[str, Any]
    advice: tuple[str, ...]
    more: str
    hopeless: bool = False

    @property
    def normal(self) -> bool:
        """True if a healthy run has such findings, too."""
        return is_normal(self.code)

    def text(self) -> str:
        """Return the printed form: one line if it is normal, else a short block."""
        if self.normal:
            return printable(f"{self.code} {self.what}")
        rows = [
            ("where", self.where or _place(self)),
            ("since", f"step {self.since}" if self.since else ""),
            ("seen", in_words(self.evidence)),
            ("cost", self.cost),
            *(
                (f"try {number}", advice)
                for number, advice in enumerate(self.advice, start=1)
            ),
            ("more", self.more),
        ]
        at = f" step {self.step}" if self.step else ""
        lines = [f"{self.code}{at}: {self.what}"]
        lines += [f"  {name:<6} {value}" for name, value in rows if value]
        # Names and messages may come from a file of any origin.
        return "\n".join(map(printable, lines))

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return {
            "code": self.code,
            "cause": self.cause,
            "where": self.where,
            "step": self.step,
            "since": self.since,
            "what": self.what,
            "cost": self.cost,
            "evidence": dict(self.evidence),
            "advice": list(self.advice),
        }


class Health(Enum):
    """The state of a whole run.

    >>> Health.of([]).exit_code
    0
    """

    HEALTHY = "healthy"
    FINDINGS = "findings"
    COLLAPSE = "collapse"

    @property
    def exit_code(self) -> int:
        """The exit code of commands that judge a run."""
        return list(Health).index(self)

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> "Health":
        """Return the state of a run with these findings."""
        serious = [finding for finding in findings if not finding.normal]
        if any(finding.hopeless for finding in serious):
            return cls.COLLAPSE
        return cls.FINDINGS if serious else cls.HEALTHY

    def __str__(self) -> str:
        return self.value


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, most severe first, then in the order of steps.

    A misuse of the scaler comes before its possible consequences, and a finding with a
    cause before one without.
    """

    def severity(finding: Finding) -> tuple[bool, bool, bool, bool, int, int]:
        rank = _RANK.get(finding.code, len(SEVERITY))
        known = bool(finding.cause)
        misuse = BY_CODE.get(finding.code, _OTHER).misuse
        hopeless = finding.hopeless
        return not misuse, not hopeless, finding.normal, not known, rank, finding.since

    return sorted(findings, key=severity)


def clear_recovered(findings: Iterable[Finding], healthy_at: int) -> list[Finding]:
    """Return the findings, with `hopeless` cleared where the run recovered later.

    Args:
        findings: In any order.
        healthy_at: The last step that ended ten finite ones in a row:
            `Judge.healthy_at`.
    """
    return [
        finding._replace(hopeless=False, evidence={**finding.evidence, "mended": True})
        if finding.hopeless and finding.step < healthy_at
        else finding
        for finding in findings
    ]


def merge_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each cause, or code without a cause, and location.

    Findings that count all occurrences so far form one group per code, with the
    location and the cause of the last of them. A group becomes its last hopeless
    finding, else its last with the cause, with the earliest `since` and, as evidence,
    the number of times: the largest count in the group, or its size.
    """
    every = list(findings)
    # The last of those that count all occurrences, and name a cause.
    last = {each.code: each for each in every if _counts_all(each)}
    last |= {each.code: each for each in every if _counts_all(each) and each.cause}
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in every:
        known = last[finding.code] if _counts_all(finding) else finding
        key = (known.cause or known.code, known.where)
        groups.setdefault(key, []).append(finding)
    return [_merged(group, key[0]) for key, group in groups.items()]


def lost_batches(number: int) -> str:
    """Return a number of lost batches in words."""
    return "1 batch lost" if number == 1 else f"{number} batches lost"


def _counts_all(finding: Finding) -> bool:
    return finding.code == "GS211" or bool(finding.evidence.get("recovered"))


def _merged(group: list[Finding], cause: str) -> Finding:
    hopeless = [finding for finding in group if finding.hopeless]
    named = [each for each in group if each.cause == cause]
    kept = (hopeless or named or group)[-1]
    same = [finding for finding in group if finding.code == kept.code]
    if len(group) == 1:
        return kept
    steps = [finding.step for finding in same]
    counted = max(finding.evidence.get("times", 1) for finding in same)
    times = max(len(same), counted)
    first, last = min(steps), max(steps)
    repeats = ""
    if times == 2:
        repeats = f"; reported twice (steps {first} and {last})"
    elif times > 1:
        repeats = f"; {times} times (steps {first} to {last})"
    seen = {"times": times, "first_step": first, "last_step": last}
    # By episode: one may have several findings.
    batches = {f.since: f.evidence["batches"] for f in same if "batches" in f.evidence}
    cost = kept.cost
    if len(batches) > 1 and "batches" in kept.evidence:
        cost = lost_batches(sum(batches.values()))
    return kept._replace(
        since=min(finding.since for finding in group),
        what=f"{kept.what}{repeats}",
        cost=cost,
        evidence={**kept.evidence, **(seen if repeats else {})},
    )


def _place(finding: Finding) -> str:
    """Return the location to print if no tensor or module is named."""
    seen = finding.evidence
    if "loss" in seen and finding.code == "GS202":
        return BY_CODE["GS203"].location
    if seen.get("culprits") and seen.get("tensors"):
        return f"{seen['culprits']} of {seen['tensors']} tensors"
    return BY_CODE.get(finding.code, _OTHER).location
