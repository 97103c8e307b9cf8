"""Which tensors were not finite in a step, on the way to the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradscale.torch.device_state.late import Late
from gradscale.torch.names import apart, names_of
from gradscale.torch.step.optimizer_step import OpenStep


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

    Attributes:
        on_its_way: Something may not be on the host yet; the same on every rank.
    """

    def __init__(self, steps: Sequence[OpenStep]) -> None:
        self._copies = [copy for step in steps for copy in _copies_of(step)]
        # By where the facts are made: a rank without gradients waits like the others.
        readings = [step.reading for step in steps if step.reading is not None]
        self.on_its_way = any(reading.home.type == "cuda" for reading in readings)

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
        peaks: dict[str, float] = {}
        for copy in self._copies:
            names = names_of(copy.params, (model, *copy.sources))
            free = apart(names, set(peaks))
            peaks.update(zip(free, copy.facts.values()[0].tolist(), strict=True))
        return peaks


def _copies_of(step: OpenStep) -> list[_Copy]:
    if step.reading is None or step.multiplier is None:
        return []
    return [
        _Copy(Late(facts), params, step.names)
        for params, facts in step.reading.facts(step.multiplier)
    ]
