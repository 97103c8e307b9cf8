"""The properties of every verdict and finding, one row each.

A new verdict needs a member of `gradscale.core.records.Verdict`, a row here, an entry
in `judge/catalogue.toml` and, if it is reported, a builder in
`gradscale.judge.finding_builders`, called by `gradscale.judge.judge`, with its causes
in `gradscale.judge.causes`; also `gradscale.diagnosis.records` where `Row.implies`
cannot rebuild the step's record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from gradscale.core.records import Verdict

# Steps of one verdict, close together, that make a phase of a run.
LASTING = 3


class Skip(Enum):
    """The reason for which a step was skipped."""

    NONE = "not skipped"
    SCALE = "the gradients do not fit at this scale"
    CAUSE = "a known cause other than the scale"
    ANY_SCALE = "the gradients do not fit at any scale"


class Look(NamedTuple):
    """The appearance of a verdict in charts.

    Attributes:
        rank: Of several verdicts in one column of a chart, the lowest rank is shown.
        letter: In a terminal chart, legible without colour.
        style: On the terminal.
        colour: In a figure, from the palettes of Okabe and Ito and of Tol, which are
            safe for colour-blind readers.
        shape: In a figure.
    """

    rank: int
    letter: str
    style: str
    colour: str
    shape: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """The properties of one code.

    Attributes:
        code: The code in the catalogue; also the key of its advice.
        verdict: The verdict with this code; None for a finding that is no verdict.
        skip: The reason of the skip.
        hopeless: Its finding is hopeless whenever it is reported.
        implies: Fields of a `StepRecord` that follow from the verdict.
        after_finite: The verdict is given only after a first finite step.
        phase_after: Steps that make a phase of a run; 0 if the verdict never does.
        location: The default location in the text of a finding.
        located: Its finding takes the location observed by module hooks.
        loss_finite: Whether the loss was finite in such steps; None for either.
        warned: Reported as a warning by the scaler, not by the monitor.
        raised: Raised by the scaler at the floor, for any guard.
        misuse: A misuse of the scaler, which comes before its consequences.
        look: The appearance in charts; None if there is no verdict.
    """

    code: str
    verdict: Verdict | None = None
    skip: Skip = Skip.NONE
    hopeless: bool = False
    implies: Mapping[str, Any] = field(default_factory=dict)
    after_finite: bool = False
    phase_after: int = LASTING
    location: str = "the backward pass"
    located: bool = False
    loss_finite: bool | None = True
    warned: bool = False
    raised: bool = False
    misuse: bool = False
    look: Look | None = None

    @property
    def normal(self) -> bool:
        """True if a healthy run has it."""
        return is_normal(self.code)

    @property
    def skipped(self) -> bool:
        """True if the step was skipped although there were gradients."""
        return self.skip is not Skip.NONE

    @property
    def module_hooks(self) -> bool:
        """True if repeated steps of this verdict enable the module hooks."""
        return self.skipped and not self.normal


def is_normal(code: str) -> bool:
    """Return whether a code is in the section of normal events."""
    return code.startswith("GS0")


# The order of severity: causes before their consequences, normal events last.
TABLE = (
    Row(
        code="GS207",
        verdict=Verdict.WEIGHTS_NONFINITE,
        skip=Skip.CAUSE,
        hopeless=True,
        implies={"weights_finite": False},
        phase_after=1,
        location="the weights",
        located=True,
        loss_finite=None,
        look=Look(0, "W", "bold red", "#000000", "diamond"),
    ),
    Row(
        code="GS203",
        verdict=Verdict.FORWARD_NONFINITE,
        skip=Skip.CAUSE,
        implies={"loss_finite": False},
        location="the forward pass",
        located=True,
        loss_finite=False,
        look=Look(2, "F", "bold red", "#CC79A7", "square"),
    ),
    Row(
        code="GS208",
        verdict=Verdict.GENUINE,
        skip=Skip.ANY_SCALE,
        hopeless=True,
        phase_after=1,
        located=True,
        look=Look(3, "G", "bold red", "#D55E00", "cross"),
    ),
    Row(
        code="GS202",
        verdict=Verdict.COLLAPSE,
        skip=Skip.ANY_SCALE,
        hopeless=True,
        phase_after=1,
        located=True,
        raised=True,
        look=Look(1, "C", "bold red", "#882255", "triangle-down"),
    ),
    *(
        Row(code=code, location="the training loop", misuse=True)
        for code in ("GS104", "GS112", "GS113", "GS114", "GS115", "GS116", "GS117")
    ),
    Row(code="GS122", location="the training loop", misuse=True),
    Row(code="GS123", location="the training loop", misuse=True),
    Row(code="GS118", location="the training loop", misuse=True),
    Row(code="GS119", location="the optimizer", misuse=True),
    Row(code="GS120", location="the weights", misuse=True),
    Row(code="GS211", located=True),
    Row(code="GS205", located=True, warned=True),
    Row(
        code="GS201",
        verdict=Verdict.OVERFLOW,
        skip=Skip.SCALE,
        after_finite=True,
        phase_after=0,
        located=True,
        look=Look(8, "o", "yellow", "#E69F00", "circle"),
    ),
    Row(code="GS210", located=True),
    Row(
        code="GS209",
        verdict=Verdict.UNDERFLOW,
        look=Look(4, "u", "yellow", "#E69F00", "triangle-down"),
    ),
    Row(
        code="GS206",
        verdict=Verdict.LOSS_OVERFLOW,
        skip=Skip.CAUSE,
        implies={"scaled_loss_finite": False, "finite": False},
        location="the loss",
        look=Look(5, "L", "yellow", "#E69F00", "square"),
    ),
    Row(
        code="GS204",
        verdict=Verdict.NORM_OVERFLOW,
        skip=Skip.CAUSE,
        implies={"norm_finite": False, "finite": True},
        location="the norm of all gradients",
        look=Look(6, "N", "yellow", "#E69F00", "diamond"),
    ),
    Row(
        code="GS103",
        verdict=Verdict.NO_GRADIENTS,
        implies={"read": False},
        location="the parameters of the optimizer",
        warned=True,
        look=Look(7, "-", "yellow", "#999999", "square"),
    ),
    Row(code="GS121", location="the forward pass"),
    Row(code="GS001"),
    Row(
        code="GS002",
        verdict=Verdict.CALIBRATING,
        skip=Skip.SCALE,
        phase_after=1,
        look=Look(9, "c", "cyan", "#56B4E9", "circle"),
    ),
    Row(
        code="GS003",
        verdict=Verdict.PROBING,
        skip=Skip.SCALE,
        implies={"grown": True},
        after_finite=True,
        phase_after=0,
        look=Look(10, "p", "cyan", "#009E73", "triangle-up"),
    ),
    Row(
        code="GS000",
        verdict=Verdict.OK,
        phase_after=0,
        look=Look(11, " ", "green", "#0072B2", "circle"),
    ),
)
BY_CODE = {row.code: row for row in TABLE}
BY_VERDICT = {row.verdict: row for row in TABLE if row.verdict is not None}
# The findings of a judge that are not normal, most severe first.
SEVERITY = tuple(row.code for row in TABLE if not row.normal)


def codes_where(holds: Callable[[Row], bool]) -> tuple[str, ...]:
    """Return the codes with a property, most severe first.

    >>> codes_where(lambda row: row.hopeless)
    ('GS207', 'GS208', 'GS202')
    """
    return tuple(row.code for row in TABLE if holds(row))


def verdicts_where(holds: Callable[[Row], bool]) -> tuple[Verdict, ...]:
    """Return the verdicts with a property, most severe first."""
    return tuple(verdict for verdict, row in BY_VERDICT.items() if holds(row))
