"""The catalogue: one entry for each code a user can see. Its texts: catalogue.toml.

Read by commands and the documentation, never by a training process.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECTIONS = {
    "GS0": "Normal",
    "GS1": "Wrong use",
    "GS2": "Numeric trouble",
    "GS3": "State and resume",
}
# The assumptions of every example.
GIVEN = (
    "The examples assume that model, optimizer, batch and batches exist; scaler is "
    'gradscale.torch.GradScaler("cuda", model=model); loss_of(batch) runs the model '
    "under float16 autocast and returns the loss."
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One code: its meaning and the remedies.

    Attributes:
        code: GS and three digits; the first digit is the section.
        name: The name of the code, in kebab case.
        summary: One sentence without a full stop.
        meaning: The conditions under which it is reported.
        why: The consequences, or why there are none.
        example: Python that leads to it.
        instead: Python with the same purpose that does not lead to it; empty if no
            other code would help.
        advice: Remedies, in the order in which to try them.
        references: Addresses of further pages.
    """

    code: str
    name: str
    summary: str
    meaning: str
    why: str
    example: str
    instead: str = ""
    advice: tuple[str, ...]
    references: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The title of the section the code belongs to."""
        return SECTIONS[self.code[:3]]


def _entry(code: str, fields: Mapping[str, Any]) -> Entry:
    prose = {name: _joined(fields[name]) for name in ("summary", "meaning", "why")}
    advice = tuple(map(_joined, fields["advice"]))
    references = tuple(fields.get("references", ()))
    return Entry(
        code=code, **{**fields, **prose, "advice": advice, "references": references}
    )


def _joined(text: str) -> str:
    return " ".join(text.split())


_TEXTS = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
CATALOGUE = tuple(_entry(code, each) for code, each in tomllib.loads(_TEXTS).items())
BY_CODE = {entry.code: entry for entry in CATALOGUE}
