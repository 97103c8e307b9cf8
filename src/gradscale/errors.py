"""The exceptions gradscale raises.

GradscaleError
├── AmpError         a use of gradscale.apex that apex refuses too
├── ConfigError      a setting or an argument that can never work
├── OrderError       a call at the wrong time
├── GradientError    a gradient that cannot be read or unscaled
├── StateError       a checkpoint or a run file that cannot be used
├── ScaleCollapsed   the scale is at its floor and gradients are still not finite
└── HopelessRun      no scale can help; the code and the text name the cause

Each also derives from the built-ins that the replaced scaler raises for the same
mistake, so that an `except` clause written for it still works.
"""

from collections.abc import Sequence
from typing import Any


class GradscaleError(Exception):
    """Base of all errors raised by gradscale.

    Args:
        message: The problem, its cause and the remedy.
        code: The entry of the catalogue.
        replaces: The message of the replaced scaler for this mistake, if it has one.
            It becomes the first line of the text, and `message` the second.
    """

    code: str

    def __init__(self, message: str, *, code: str, replaces: str | None = None) -> None:
        coded = f"{message} [{code}]"
        super().__init__(coded if replaces is None else f"{replaces}\n{coded}")
        self.code = code

    def __str__(self) -> str:
        # KeyError would show the repr of its argument.
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.args[0]), vars(self)


def _revive(kind: type[GradscaleError], text: str) -> GradscaleError:
    error = kind.__new__(kind, text)
    error.args = (text,)
    return error


# Not a TypeError, which apex raises too: torch's operators convert one into
# NotImplemented, and Python then tries the reflected method.
class AmpError(GradscaleError, NotImplementedError, ValueError, AssertionError):
    """A use of gradscale.apex that apex refuses too, or that can never work.

    Apex raises each of these built-ins, and `RuntimeError`, which is a base of
    `NotImplementedError`.
    """


class ConfigError(GradscaleError, ValueError, AssertionError):
    """A setting or an argument that can never work."""


class OrderError(GradscaleError, RuntimeError, AssertionError):
    """A call at the wrong time."""


class GradientError(GradscaleError, ValueError):
    """A gradient that cannot be read or unscaled."""


class StateError(GradscaleError, RuntimeError, ValueError, KeyError):
    """A checkpoint or a run file that cannot be used; it was not changed."""


class ScaleCollapsed(GradscaleError, FloatingPointError):
    """The scale is at its floor and gradients are still not finite."""


class HopelessRun(GradscaleError, FloatingPointError):
    """No scale can help; the code and the text name the cause."""


class GradscaleWarning(UserWarning):
    """A problem that does not stop the run."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(f"{message} [{code}]" if code else message)
        self.code = code


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise for an option that is not one of the choices."""
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is not one of {', '.join(map(repr, choices))}. "
            "It has no meaning. Pass one of these, or leave it out.",
            code="GS101",
        )
