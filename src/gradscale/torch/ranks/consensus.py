"""One decision for all ranks.

What the ranks decide together follows from facts that all of them hold: each reading
of gradients that are spread over ranks is followed by one small all-gather. It moves
bits and compares nothing, so no NaN is dropped, and all ranks reduce the same numbers
in the same order. Whatever follows is computed by each rank for itself.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.device_state.layout import Ledger
from gradscale.torch.devices import host_may_act
from gradscale.torch.grads.stats import Agreed, Reading
from gradscale.torch.ranks.desync import Place, RollCall
from gradscale.torch.ranks.payload import agreed_of, exchange, say
from gradscale.torch.ranks.sharding import Spread, spread_of


@dataclass
class Known:
    """What is kept of an optimizer.

    Attributes:
        params: All of its parameters.
        spread: How they lie across ranks; None where each rank decides alone.
        replicated: The same of parameters that lie on each rank alike, as under DDP.
        shapes: Of those that all ranks must have, as text.
        clips: How many clips were asked for so far.
        limit: (max_norm, norm_type) of the last of them.
    """

    params: list[Tensor]
    spread: Spread | None
    replicated: Spread | None
    shapes: str
    clips: int = 0
    limit: tuple[float, float] | None = None


class Voice:
    """How a rank speaks to the others about the gradients of one optimizer.

    Attributes:
        copies: As in `Spread`.
    """

    def __init__(
        self,
        ranks: "Ranks",
        known: Known,
        spread: Spread,
        ledger: Ledger,
        scale: Tensor,
        here: Place,
    ) -> None:
        self.copies = spread.copies
        self._ranks = ranks
        self._known = known
        self._group = spread.group
        self._ledger = ledger
        self._scale = scale
        self._here = here

    def agree(self, reading: Reading, order: float) -> Reading:
        """Return the reading with what all ranks have read. No host sync.

        Args:
            reading: Of this rank, with the norm; without kinds if it has no gradient.
            order: Of the norm.
        """
        agreed = self._exchange(reading.groups, reading.norm, order)
        return replace(reading, norm_type=order, agreed=agreed)

    def agree_on_norm(self, norm: Tensor | None, order: float) -> Tensor:
        """Return the norm of the whole, f64[], from that of this rank's part."""
        return self._exchange([], norm, order).norm

    def clips(self, max_norm: float, norm_type: float) -> None:
        """Note a clip: all ranks must ask for the same ones."""
        if not torch.compiler.is_compiling():
            self._known.clips += 1
            self._known.limit = max_norm, norm_type

    def refuse(self) -> None:
        """Tell the others that this rank is about to raise an error."""
        number = self._place().number()
        words = say([], None, self._ledger, self._scale, number, refuses=True)
        exchange(words, self._group)

    def _exchange(
        self,
        groups: list[tuple[torch.dtype, Tensor]],
        norm: Tensor | None,
        order: float,
    ) -> Agreed:
        ledger, place = self._ledger, self._place()
        words = say(groups, norm, ledger, self._scale, place.number())
        said = exchange(words, self._group)
        agreed = agreed_of(said, order)
        ledger.fields.loss_trace.copy_(
            torch.where(agreed.bad_loss == 0.0, 0.0, torch.nan)
        )
        self._ranks.losses_are_known = True
        if host_may_act():
            self._ranks.roll_call.note(said, agreed.astray, place, self._group)
        return agreed

    def _place(self) -> Place:
        known = self._known
        self._here = self._here._replace(
            reading=self._here.reading + 1, clips=known.clips, limit=known.limit
        )
        return self._here


class Ranks:
    """Finds out, for each optimizer of a scaler, which ranks decide together.

    Args:
        given: The group to decide in, whatever the parameters tell; or None.
        always: Decide in the group of all ranks if none was given.
        replicas: The group whose ranks hold copies of one another, as under DDP, and
            so agree without a word on everything but their losses; None if unknown.
        share_losses: Replicas tell one another in every reading whether their losses
            were finite. Else they only compare their places, once.

    Attributes:
        roll_call: Notices ranks that are astray.
        speak_always: Whatever the parameters are, there is an exchange in each reading.
        losses_are_known: Every loss since the last update is known to all ranks.
        apart: Replicas do not speak to one another: some have run out of data.
    """

    def __init__(
        self,
        given: Any,
        *,
        always: bool = False,
        replicas: Any = None,
        share_losses: bool = False,
    ) -> None:
        self.roll_call = RollCall()
        self.speak_always = always or given is not None
        self.losses_are_known = False
        self.apart = False
        self._given = given
        self._always = always
        self._replicas = replicas
        self._share_losses = share_losses
        self._compared = False
        self._known: dict[int, Known] = {}

    def voice(
        self,
        key: int,
        params: list[Tensor],
        ledger: Ledger,
        scale: Tensor,
        settings: Any,
        who: int,
    ) -> Voice | None:
        """Return how to speak about an optimizer; None where each rank decides alone.

        Args:
            key: Whose spread is kept.
            params: All parameters of the optimizer.
            ledger: The scaler's.
            scale: f32[], the scaler's.
            settings: What must be the same on all ranks.
            who: As in `Place.optimizer`.
        """
        known = self._known.get(key)
        if (
            known is None
            or len(known.params) != len(params)
            or not all(map(is_, known.params, params))
        ):
            known = self._known[key] = self._look_at(params, key)
        place = Place(settings, who, known.shapes)
        spread = known.spread
        if known.replicated is not None and not self.apart:
            if self._share_losses:
                spread = known.replicated
            elif not self._compared:
                self._compare(ledger, scale, place)
        if spread is None:
            return None
        return Voice(self, known, spread, ledger, scale, place)

    def _compare(self, ledger: Ledger, scale: Tensor, place: Place) -> None:
        """Compare the places of replicas once: one with other settings is astray."""
        if host_may_act():
            self._compared = True
            words = say([], None, ledger, scale, place.number())
            said = exchange(words, self._replicas)
            astray = agreed_of(said, 2.0).astray
            self.roll_call.note(said, astray, place, self._replicas)

    def _look_at(self, params: list[Tensor], key: int) -> Known:
        given = self._given
        if given is None and self._always:
            given = torch.distributed.group.WORLD
        spread = spread_of(params, given)
        # Bare parameters may be those with a gradient, others on each rank.
        shapes = "" if key == -1 else self._shapes(params, spread)
        replicated = None
        if spread is None and self._replicas is not None:
            ranks = float(torch.distributed.get_world_size(self._replicas))
            copies = dict.fromkeys(map(id, params), ranks)
            replicated = Spread(self._replicas, copies)
        # A copy: the list may be the optimizer's own, which grows.
        return Known(list(params), spread, replicated, shapes)

    def _shapes(self, params: list[Tensor], spread: Spread | None) -> str:
        """Return the shapes of those parameters that all ranks have, as text."""
        if spread is None:
            return _listed(params) if self._replicas is not None else ""
        ranks = torch.distributed.get_world_size(spread.group)
        meshes = [getattr(param, "device_mesh", None) for param in params]
        # What lies on a smaller mesh may be one stage of a pipeline.
        pairs = zip(params, meshes, strict=True)
        return _listed([p for p, mesh in pairs if mesh and mesh.size() == ranks])

    def forget(self, key: int) -> None:
        """Let go of an optimizer that is gone."""
        self._known.pop(key, None)


def _listed(params: Sequence[Tensor]) -> str:
    """Return the shapes as text that differs where they do, but is not long."""
    shapes = [str(tuple(param.shape)) for param in params]
    if len(shapes) <= 4:
        return ", ".join(shapes)
    rest = zlib.crc32(" ".join(shapes).encode())
    return f"{', '.join(shapes[:3])} and {len(shapes) - 3} more, sum {rest:08x}"
