"""Whether all ranks stand at the same place."""

import zlib
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import OrderError
from gradscale.torch.device_state.flag import Flag
from gradscale.torch.device_state.host_copy import LAG
from gradscale.torch.ranks.payload import REFUSES, SCALE, UPDATES


class Place(NamedTuple):
    """Where a rank stands when it speaks; the same on all ranks if all is well.

    Attributes:
        settings: Those that every rank must have.
        optimizer: Which of the scaler's optimizers it speaks of, in the order of their
            first touch; -1 for bare parameters.
        shapes: Of those parameters that all ranks must have; "" if there are none.
        reading: Which reading of these gradients this is since the last update.
        clips: How many clips of this optimizer were asked for so far.
        limit: (max_norm, norm_type) of the last of them, if any.
    """

    settings: Any
    optimizer: int
    shapes: str = ""
    reading: int = 0
    clips: int = 0
    limit: tuple[float, float] | None = None

    def number(self) -> float:
        """Return a number that differs where places differ."""
        if torch.compiler.is_compiling():
            # It would be a constant of the graph, and of this rank.
            return 0.0
        return float(zlib.crc32(repr(self).encode()))


class RollCall:
    """Notices that the ranks do not stand at the same place.

    On the CPU at once. Elsewhere the first time at once and then late, on facts that
    have arrived: in the same call on all ranks, because all hold the same facts.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[Flag, Tensor, Place]] = deque()
        self._begun = False

    def note(self, said: Tensor, astray: Tensor, place: Place, group: Any) -> None:
        """Take down what the ranks have said; raise if they were apart.

        Args:
            said: f64[ranks, WORDS].
            astray: f32[], 1 if a rank stands elsewhere or refuses its gradients.
            place: Of this rank.
            group: The ranks.

        Raises:
            OrderError: They do not stand at the same place.
        """
        self._late.append((Flag.start(astray), said, place))
        late = LAG if self._begun and said.device.type != "cpu" else 0
        self._begun = True
        while len(self._late) > late:
            flag, said, place = self._late.popleft()
            if flag.value():
                self._late.clear()
                raise _apart(said.tolist(), place, group)


def _apart(said: list[list[float]], place: Place, group: Any) -> OrderError:
    """Return the error that names the ranks; all of them call it."""
    whole = torch.distributed.group.WORLD if group is None else group
    ranks = torch.distributed.get_process_group_ranks(whole)
    refusing = [rank for rank, words in zip(ranks, said, strict=True) if words[REFUSES]]
    if refusing:
        return OrderError(
            f"{_named(refusing).capitalize()} found gradients that cannot be used, and "
            "stopped. The others cannot step alone. Look at the error there.",
            code="GS111",
        )
    places: list[Place] = [place] * len(ranks)
    torch.distributed.all_gather_object(places, place, group=group)
    facts = [
        ["with " + ", ".join(map(repr, one.settings)) for one in places],
        [f"at update {int(words[UPDATES])}" for words in said],
        [f"at scale {words[SCALE]:g}" for words in said],
        [f"in reading {one.reading} of {_called(one)}" for one in places],
        [f"after {_clipped(one)} of {_called(one)}" for one in places],
    ]
    apart = next(seen for seen in facts if len(set(seen)) > 1)
    at = {
        what: [r for r, one in zip(ranks, apart, strict=True) if one == what]
        for what in dict.fromkeys(apart)
    }
    told = "; ".join(f"{_named(those)} {what}" for what, those in at.items())
    return OrderError(
        f"The ranks do not stand at the same place: {told}. They would take different "
        "decisions, or wait for one another for ever. Give every rank the same "
        "settings, load the same checkpoint on all of them, and call the scaler "
        "equally often and in the same order.",
        code="GS111",
    )


def _named(ranks: list[int]) -> str:
    """Return "rank 2" or "ranks 0, 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _called(place: Place) -> str:
    if place.optimizer < 0:
        return "parameters"
    shapes = f" (shapes {place.shapes})" if place.shapes else ""
    return f"optimizer {place.optimizer}{shapes}"


def _clipped(place: Place) -> str:
    """Return "no clip" or "3 clips, the last by max_norm=1.0, norm_type=2.0,"."""
    if place.limit is None:
        return "no clip"
    max_norm, norm_type = place.limit
    last = f"the last by max_norm={max_norm}, norm_type={norm_type},"
    return f"{place.clips} clip{'s' if place.clips > 1 else ''}, {last}"
