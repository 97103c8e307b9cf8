"""Which tensors were not finite in a step, on the way to the host."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from gradscale.torch.late import Late
from gradscale.torch.names import names_of
from gradscale.torch.open_step import OpenStep


class _Copy(NamedTuple):
    """Facts of some parameters on their way.

    Attributes:
        facts: float[2, n], the largest magnitude of each gradient, and 1 for one that
            was not finite.
        params: The parameters behind them.
        sources: Where their names are looked up.
    """

    facts: Late
    params: list[Tensor]
    sources: tuple[Any, ...]


class Notice:
    """The culprits of one step. Starting it costs no host sync; reading may wait.

    Args:
        steps: What each optimizer has done, as the update left it.
    """

    def __init__(self, steps: Iterable[OpenStep]) -> None:
        self._copies = [copy for step in steps for copy in _copies_of(step)]

    @property
    def on_its_way(self) -> bool:
        """Whether something is not on the host yet."""
        return any(copy.facts.on_its_way for copy in self._copies)

    @property
    def tensors(self) -> int:
        """How many gradients were looked at."""
        return sum(len(copy.params) for copy in self._copies)

    def names(self, model: Any = None) -> list[str]:
        """Return the culprits in the order of their optimizers.

        Args:
            model: Knows their names, if the step does not.
        """
        found = []
        for copy in self._copies:
            flags = copy.facts.values()[1].tolist()
            bad = [p for p, flag in zip(copy.params, flags, strict=True) if flag]
            found += names_of(bad, (model, *copy.sources)) if bad else []
        return found

    def peaks(self, model: Any = None) -> dict[str, float]:
        """Return the largest magnitude of each gradient that was looked at.

        Args:
            model: As for `names`.
        """
        return {
            name: peak
            for copy in self._copies
            for name, peak in zip(
                names_of(copy.params, (model, *copy.sources)),
                copy.facts.values()[0].tolist(),
                strict=True,
            )
        }


def _copies_of(step: OpenStep) -> list[_Copy]:
    if step.reading is None or step.multiplier is None:
        return []
    return [
        _Copy(Late(facts), params, step.names)
        for params, facts in step.reading.facts(step.multiplier)
    ]
