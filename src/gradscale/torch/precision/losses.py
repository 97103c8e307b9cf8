"""Separate scales for several losses.

The gradients of every loss are rescaled to the scaler's scale and added up there, so
that an optimizer gets one sum, regardless of the scales. With factors that are powers
of two, the sum in f32 is that of the unscaled gradients, bit for bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy, SavedLoss
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.errors import ConfigError
from gradscale.torch.devices import to_device
from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.stats import largest, read
from gradscale.torch.grads.unscale import multiply_

LossId = int | str
# The loss that is scaled by the scaler's own scale.
MAIN: LossId = 0


def check_loss_id(id: Any) -> None:
    """Raise for an id that a checkpoint could not hold."""
    if isinstance(id, bool) or not isinstance(id, (int, str)):
        raise ConfigError(
            f"id={id!r} is a {type(id).__name__}. A loss is known by its id, also in a "
            "checkpoint. Pass a whole number or a string.",
            code="GS101",
        )


class LossScales:
    """The scales of losses other than the main one.

    Attributes:
        states: The policy's state of each loss by its id; tensors written in place.
        found: For each loss since the last update, f32[]: 1 if it gave a gradient that
            is not finite, else 0. The main loss too, if it has run with an id.
        contexts: The number of scalar losses scaled with an id since the last update.
        in_block: The block of a loss is running.
    """

    def __init__(self, resumed: Iterable[SavedLoss] = ()) -> None:
        self.states: dict[LossId, FixedState | ScaleState] = {}
        self.found: dict[LossId, Tensor] = {}
        self.contexts = 0
        self.in_block = False
        self._resumed = {loss.id: loss for loss in resumed}

    def scale(self, id: LossId, policy: AnyPolicy, device: torch.device) -> Tensor:
        """Return f32[], the scale of a loss, made with its first use."""
        if id not in self.states:
            first: Any = policy.init_state()
            saved = self._resumed.pop(id, None)
            if saved is not None:
                first = type(first)(*saved[1 : 1 + len(first)])
            self.states[id] = type(first)(*(_scalar(v, device) for v in first))
        return self.states[id].scale

    def note(self, id: LossId, found: Tensor) -> None:
        """Note whether a loss gave a gradient that is not finite."""
        before = self.found.get(id)
        self.found[id] = found if before is None else torch.maximum(before, found)

    def forget(self) -> None:
        """Forget the losses since the last update."""
        self.found, self.contexts = {}, 0

    def end_update(
        self, policy: AnyPolicy, skips: Sequence[Tensor], *, plain: bool, group: Any
    ) -> Tensor | None:
        """Move the scales of the losses since the last update, and forget these.

        Args:
            policy: Its rule moves them.
            skips, plain: As for `rule_skip`.
            group: The ranks that decide together, on which the same losses have run;
                None for one alone.

        Returns:
            As `rule_skip`: the skip that the rule of the scaler's own scale observes.
        """
        self.update_(policy, group)
        rule_skip = self.rule_skip(skips, plain=plain)
        self.forget()
        return rule_skip

    def rule_skip(self, skips: Sequence[Tensor], *, plain: bool) -> Tensor | None:
        """Return f32[], 1 if the main loss gave non-finite gradients; None without one.

        Args:
            skips: f32[] each, 1 where an optimizer's step is skipped.
            plain: A loss was also scaled by `scale()`. Only the sum of its gradients
                and those of others is known, so it counts as not finite only if no
                other loss was.
        """
        if MAIN in self.found:
            return self.found[MAIN]
        if not plain:
            return None
        return largest(list(skips)) * (1.0 - largest(list(self.found.values())))

    def update_(self, policy: AnyPolicy, group: Any) -> None:
        """Move the scales of the losses since the last update. No host sync.

        Args:
            policy: Its rule moves them.
            group: The ranks that decide together, on which the same losses have run;
                None for one alone.
        """
        if group is not None:
            flags = torch.stack(list(self.found.values()))
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group)
            self.found = dict(zip(self.found, flags.unbind(), strict=True))
        for id, found in self.found.items():
            if id == MAIN:
                continue
            state: Any = self.states[id]
            observed = Observed(found == 0.0, torch.zeros_like(found), True)
            moved: Any = policy.next_state(state, observed, torch.where)
            # In place: a captured graph holds these very tensors.
            for tensor, value in zip(state, moved, strict=True):
                tensor.copy_(torch.as_tensor(value))

    def value(self, id: LossId) -> float:
        """Return the scale of a loss as a float. Syncs.

        Raises:
            ConfigError: No such loss was scaled yet.
        """
        saved = self.saved()
        found = [loss.scale for loss in saved if loss.id == id]
        if not found:
            known = [MAIN, *(loss.id for loss in saved)]
            raise ConfigError(
                f"loss_scale({id!r}): no loss with this id was scaled yet. A loss gets "
                f"its scale with its first use. Known ids: {known}. Call "
                f"scaler.loss(loss, id={id!r}) first.",
                code="GS101",
            )
        return found[0]

    def saved(self) -> tuple[SavedLoss, ...]:
        """Return the values of a checkpoint. Syncs."""
        there = []
        for id, state in self.states.items():
            values = [tensor.item() for tensor in state]
            there.append(SavedLoss(id, *values))
        return (*there, *self._resumed.values())


class Stash(NamedTuple):
    """The gradients of parameters before the backward pass of one loss.

    Attributes:
        params: Parameters that the pass may give a gradient.
        grads: Their gradients before the pass.
    """

    params: list[Tensor]
    grads: list[Tensor | None]

    def put_back(self) -> None:
        """Restore the gradients in place of new ones."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    @torch.no_grad()
    def add_to_new(self) -> None:
        """Add the stashed gradients to the new ones."""
        for param, before in zip(self.params, self.grads, strict=True):
            if before is None:
                continue
            if param.grad is None:
                param.grad = before
            elif param.grad.is_sparse and not before.is_sparse:
                param.grad = before.add_(param.grad)
            else:
                # Into the new gradient: it may be a view of a bucket of DDP.
                param.grad.add_(before)


def stash_grads(params: Iterable[Tensor]) -> Stash:
    """Set gradients aside and clear them, so that a backward pass makes new ones."""
    unique = list({id(param): param for param in params}.values())
    stash = Stash(unique, [param.grad for param in unique])
    for param in unique:
        param.grad = None
    return stash


@torch.no_grad()
def merge_(stash: Stash, scale: Tensor, common: Tensor, names: Sequence[Any]) -> Tensor:
    """Rescale new gradients to the common scale, and add the stashed ones to them.

    No host sync.

    Args:
        stash: The stash of parameters that now have the gradients of one loss.
        scale: f32[], the scale of that loss.
        common: f32[], the scale of the stashed gradients and of the sum.
        names: Where the names of the parameters are looked up.

    Returns:
        f32[], 1 if an element was not finite, or is not at the common scale; else 0.
    """
    made = [param for param in stash.params if param.grad is not None]
    snapshot = collect(made, allow_fp16=True, names=tuple(names))
    found = torch.zeros_like(common)
    if snapshot.tensors:
        factor = common / scale
        stats = read(snapshot, common.device)
        found = stats.nonfinite(factor, divide=False)
        multiply_(snapshot.originals or snapshot.tensors, factor, snapshot.kind)
    stash.add_to_new()
    return to_device(found, common.device)


def _scalar(value: Any, device: torch.device) -> Tensor:
    dtype = torch.float32 if isinstance(value, float) else torch.int32
    return torch.full((), value, dtype=dtype, device=device)
