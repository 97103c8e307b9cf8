"""The fields of a state that another scaler saved, read as numbers or refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from gradscale.errors import StateError


@dataclass(frozen=True)
class Fields:
    """The fields of a saved state, read as numbers or refused.

    Attributes:
        source: Who saved it, in words.
        values: Python numbers, or arrays and tensors of one element. Reading one that
            is on a device waits for it.
    """

    source: str
    values: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self._plain(key)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise self.bad(key, "one number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.bad(key, "a finite number")
        return number

    def whole(self, key: str, least: int = 0) -> int:
        """Return a whole number that is not below `least`."""
        number = self.number(key)
        if not number.is_integer() or number < least:
            raise self.bad(key, f"a whole number, {least} or more")
        plain = self._plain(key)
        return int(plain) if isinstance(plain, Integral) else int(number)

    def flag(self, key: str) -> bool:
        """Return True or False."""
        value = self._plain(key)
        if not isinstance(value, bool):
            raise self.bad(key, "True or False")
        return value

    def bad(self, key: str, wanted: str) -> StateError:
        """Return what to say of a value that cannot be gone on with."""
        return StateError(
            f"The state saved by {self.source} has {key}={self.values[key]!r}, which "
            f"is not {wanted}. Going on with it would corrupt the run. Nothing was "
            "imported; repair the value, or start without this state.",
            code="GS302",
        )

    def _plain(self, key: str) -> Any:
        if key not in self:
            raise StateError(
                f"The state saved by {self.source} lacks {key}. Going on without it "
                "would start from another state than the one that was saved. Pass the "
                "state whole, as it was saved.",
                code="GS302",
            )
        value = self.values[key]
        if isinstance(value, Real) or not hasattr(value, "item"):
            return value
        try:
            return value.item()
        # Of several elements: a ValueError in NumPy and JAX, a RuntimeError in torch.
        except (TypeError, ValueError, RuntimeError) as error:
            raise self.bad(key, "one number") from error
