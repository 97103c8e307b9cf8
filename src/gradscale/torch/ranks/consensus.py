"""One decision for all ranks.

Each read of gradients that are sharded over ranks is followed by one small all-gather.
It moves bits and compares nothing, so no NaN is dropped, and all ranks reduce the same
numbers in the same order: each computes the same decision for itself.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.device_state.layout import DeviceState
from gradscale.torch.devices import can_touch_host
from gradscale.torch.grads.stats import GradStats, RankStats
from gradscale.torch.ranks.desync import DesyncCheck, RankPosition
from gradscale.torch.ranks.payload import agreed_of, exchange, payload_of
from gradscale.torch.ranks.sharding import Sharding, sharding_of


@dataclass
class Known:
    """The sharding and the clips of one optimizer.

    Attributes:
        params: All of its parameters.
        sharding: How they are sharded; None where each rank decides alone.
        replicated: The same for parameters that every rank holds, as under DDP.
        shapes: Of those that all ranks must have, as text.
        clips: The number of clips so far.
        limit: (max_norm, norm_type) of the last of them.
    """

    params: list[Tensor]
    sharding: Sharding | None
    replicated: Sharding | None
    shapes: str
    clips: int = 0
    limit: tuple[float, float] | None = None


class RankChannel:
    """Exchanges one optimizer's gradient statistics with the other ranks.

    Attributes:
        copies, group: As in `Sharding`.
    """

    def __init__(
        self,
        ranks: "Ranks",
        known: Known,
        sharding: Sharding,
        state: DeviceState,
        scale: Tensor,
        here: RankPosition,
    ) -> None:
        self.copies = sharding.copies
        self._ranks = ranks
        self._known = known
        self.group = sharding.group
        self._state = state
        self._scale = scale
        self._at = here

    def agree(self, stats: GradStats, order: float) -> GradStats:
        """Return the statistics with those of all ranks. No host sync.

        Args:
            stats: Of this rank, with the norm; without kinds if it has no gradient.
            order: Of the norm.
        """
        agreed = self._exchange(stats.groups, stats.norm, order)
        return replace(stats, norm_type=order, agreed=agreed)

    def agree_on_norm(self, norm: Tensor | None, order: float) -> Tensor:
        """Return f64[], the norm over all ranks, from that of this rank's part."""
        return self._exchange([], norm, order).norm

    def clips(self, max_norm: float, norm_type: float) -> None:
        """Count a clip: all ranks must request the same ones."""
        if not torch.compiler.is_compiling():
            self._known.clips += 1
            self._known.limit = max_norm, norm_type

    def refuse(self) -> None:
        """Signal to the other ranks that this one is about to raise an error."""
        number = self._position().number()
        payload = payload_of([], None, self._state, self._scale, number, refuses=True)
        exchange(payload, self.group)

    def _exchange(
        self,
        groups: list[tuple[torch.dtype, Tensor]],
        norm: Tensor | None,
        order: float,
    ) -> RankStats:
        state, position = self._state, self._position()
        payload = payload_of(groups, norm, state, self._scale, position.number())
        payloads = exchange(payload, self.group)
        agreed = agreed_of(payloads, order)
        state.fields.loss_trace.copy_(
            torch.where(agreed.bad_loss == 0.0, 0.0, torch.nan)
        )
        self._ranks.losses_are_known = True
        if can_touch_host():
            self._ranks.desync.note(payloads, agreed.desynced, position, self.group)
        return agreed

    def _position(self) -> RankPosition:
        known = self._known
        self._at = self._at._replace(
            reading=self._at.reading + 1, clips=known.clips, limit=known.limit
        )
        return self._at


class Ranks:
    """Finds, for each optimizer of a scaler, the ranks that decide together.

    Args:
        given: The group to decide in, whatever the parameters are; or None.
        always: Decide in the group of all ranks if none was given.
        replicas: The group whose ranks hold copies of one another, as under DDP, and
            so agree on everything but their losses; None if unknown.
        share_losses: Replicas exchange in every read whether their losses were finite.
            Else they only compare their positions, once.

    Attributes:
        desync: Detects ranks that are out of step.
        always_exchange: Every read is followed by an exchange, whatever the parameters.
        losses_are_known: Every loss since the last update is known to all ranks.
        detached: Replicas exchange nothing: some have run out of data.
    """

    def __init__(
        self,
        given: Any,
        *,
        always: bool = False,
        replicas: Any = None,
        share_losses: bool = False,
    ) -> None:
        self.desync = DesyncCheck()
        self.always_exchange = always or given is not None
        self.losses_are_known = False
        self.detached = False
        self._given = given
        self._always = always
        self._replicas = replicas
        self._share_losses = share_losses
        self._compared = False
        self._known: dict[int, Known] = {}

    def channel(
        self,
        key: int,
        params: list[Tensor],
        state: DeviceState,
        scale: Tensor,
        settings: Any,
        index: int,
    ) -> RankChannel | None:
        """Return the channel of an optimizer; None where each rank decides alone.

        Args:
            key: The id of the optimizer.
            params: All parameters of the optimizer.
            state: The device state of the scaler.
            scale: f32[], the scale.
            settings: The settings that must be equal on all ranks.
            index: As in `RankPosition.optimizer`.
        """
        known = self._known.get(key)
        if (
            known is None
            or len(known.params) != len(params)
            or not all(map(is_, known.params, params))
        ):
            known = self._known[key] = self._inspect(params, key)
        position = RankPosition(settings, index, known.shapes)
        sharding = known.sharding
        if known.replicated is not None and not self.detached:
            if self._share_losses:
                sharding = known.replicated
            elif not self._compared:
                self._compare(state, scale, position)
        if sharding is None:
            return None
        return RankChannel(self, known, sharding, state, scale, position)

    def _compare(
        self, state: DeviceState, scale: Tensor, position: RankPosition
    ) -> None:
        """Compare the positions of replicas once: unequal settings are a desync."""
        if can_touch_host():
            self._compared = True
            payload = payload_of([], None, state, scale, position.number())
            payloads = exchange(payload, self._replicas)
            desynced = agreed_of(payloads, 2.0).desynced
            self.desync.note(payloads, desynced, position, self._replicas)

    def _inspect(self, params: list[Tensor], key: int) -> Known:
        given = self._given
        if given is None and self._always:
            given = torch.distributed.group.WORLD
        sharding = sharding_of(params, given)
        # Bare parameters may be those with a gradient, which differ by rank.
        shapes = "" if key == -1 else self._shapes(params, sharding)
        replicated = None
        if sharding is None and self._replicas is not None:
            ranks = float(torch.distributed.get_world_size(self._replicas))
            copies = dict.fromkeys(map(id, params), ranks)
            replicated = Sharding(self._replicas, copies)
        # A copy: the list may be the optimizer's own, which may grow.
        return Known(list(params), sharding, replicated, shapes)

    def _shapes(self, params: list[Tensor], sharding: Sharding | None) -> str:
        """Return the shapes of those parameters that all ranks have, as text."""
        if sharding is None:
            return _listed(params) if self._replicas is not None else ""
        ranks = torch.distributed.get_world_size(sharding.group)
        meshes = [getattr(param, "device_mesh", None) for param in params]
        # A smaller mesh may be one stage of a pipeline.
        pairs = zip(params, meshes, strict=True)
        return _listed([p for p, mesh in pairs if mesh and mesh.size() == ranks])

    def forget(self, key: int) -> None:
        """Release an optimizer that was deleted."""
        self._known.pop(key, None)


def _listed(params: Sequence[Tensor]) -> str:
    """Return a short text that identifies the shapes."""
    shapes = [str(tuple(param.shape)) for param in params]
    if len(shapes) <= 4:
        return ", ".join(shapes)
    rest = zlib.crc32(" ".join(shapes).encode())
    return f"{', '.join(shapes[:3])} and {len(shapes) - 3} more, sum {rest:08x}"
