"""Detects ranks that are out of step."""

import zlib
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import OrderError
from gradscale.torch.device_state.async_copy import LAG, AsyncFlag
from gradscale.torch.ranks.payload import REFUSES, SCALE, UPDATES


class RankPosition(NamedTuple):
    """The position of a rank in an exchange; the same on all ranks unless desynced.

    Attributes:
        settings: The settings, equal on all ranks.
        optimizer: The index of the optimizer, in the order of their first use; -1 for
            bare parameters.
        shapes: The shapes of parameters that all ranks have; "" if there are none.
        reading: The index of this read of its gradients since the last update.
        clips: The number of clips of this optimizer so far.
        limit: (max_norm, norm_type) of the last of them, if any.
    """

    settings: Any
    optimizer: int
    shapes: str = ""
    reading: int = 0
    clips: int = 0
    limit: tuple[float, float] | None = None

    def number(self) -> float:
        """Return a number that differs where positions differ."""
        if torch.compiler.is_compiling():
            # It would be a constant of the graph, and of this rank.
            return 0.0
        return float(zlib.crc32(repr(self).encode()))


class DesyncCheck:
    """Raises in the same call on all ranks if they are out of step.

    On the CPU it raises at once. On other devices only the first check does; later ones
    use flags of earlier exchanges, which are the same on all ranks.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[AsyncFlag, Tensor, RankPosition]] = deque()
        self._begun = False

    def note(
        self, payloads: Tensor, desynced: Tensor, position: RankPosition, group: Any
    ) -> None:
        """Check one exchange.

        Args:
            payloads: f64[ranks, FIELDS].
            desynced: f32[], 1 if a rank is out of step or refuses its gradients.
            position: The position of this rank.
            group: The ranks.

        Raises:
            OrderError: They are out of step.
        """
        self._late.append((AsyncFlag(desynced), payloads, position))
        late = LAG if self._begun and payloads.device.type != "cpu" else 0
        self._begun = True
        while len(self._late) > late:
            flag, payloads, position = self._late.popleft()
            if flag.is_set():
                self._late.clear()
                raise _apart(payloads.tolist(), position, group)


def _apart(
    payloads: list[list[float]], position: RankPosition, group: Any
) -> OrderError:
    """Return the error that names the ranks. Every rank must call this."""
    whole = torch.distributed.group.WORLD if group is None else group
    ranks = torch.distributed.get_process_group_ranks(whole)
    refusing = [
        rank for rank, payload in zip(ranks, payloads, strict=True) if payload[REFUSES]
    ]
    if refusing:
        return OrderError(
            f"{_named(refusing).capitalize()} found gradients that cannot be used, and "
            "stopped. The others cannot step alone. Look at the error there.",
            code="GS111",
        )
    positions: list[RankPosition] = [position] * len(ranks)
    torch.distributed.all_gather_object(positions, position, group=group)
    facts = [
        ["with " + ", ".join(map(repr, one.settings)) for one in positions],
        [f"at update {int(payload[UPDATES])}" for payload in payloads],
        [f"at scale {payload[SCALE]:g}" for payload in payloads],
        [f"in reading {one.reading} of {_called(one)}" for one in positions],
        [f"after {_clipped(one)} of {_called(one)}" for one in positions],
    ]
    apart = next(seen for seen in facts if len(set(seen)) > 1)
    at = {
        what: [r for r, one in zip(ranks, apart, strict=True) if one == what]
        for what in dict.fromkeys(apart)
    }
    listed = "; ".join(f"{_named(those)} {what}" for what, those in at.items())
    return OrderError(
        f"The ranks are out of step: {listed}. They would take different "
        "decisions, or wait for one another forever. Give every rank the same "
        "settings, load the same checkpoint on all of them, and call the scaler "
        "equally often and in the same order.",
        code="GS111",
    )


def _named(ranks: list[int]) -> str:
    """Return "rank 2" or "ranks 0, 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _called(position: RankPosition) -> str:
    if position.optimizer < 0:
        return "parameters"
    shapes = f" (shapes {position.shapes})" if position.shapes else ""
    return f"optimizer {position.optimizer}{shapes}"


def _clipped(position: RankPosition) -> str:
    """Return "no clip" or "3 clips, the last by max_norm=1.0, norm_type=2.0,"."""
    if position.limit is None:
        return "no clip"
    max_norm, norm_type = position.limit
    last = f"the last by max_norm={max_norm}, norm_type={norm_type},"
    return f"{position.clips} clip{'s' if position.clips > 1 else ''}, {last}"
