"""The step of one optimizer between two updates.

Its stages: collected (`snapshot`), read (`stats`), decided (`decision`), then unscaled
in place or used by the step. Each stage uses the result of the previous one.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from gradscale.errors import GradientError
from gradscale.torch import tensor_list
from gradscale.torch.device_state.async_copy import AsyncFlag
from gradscale.torch.device_state.layout import ROW
from gradscale.torch.grads.clip import Clip
from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.stats import GradStats, read
from gradscale.torch.grads.unscale import multiply_
from gradscale.torch.kernels.plain import Decision
from gradscale.torch.names import names_of
from gradscale.torch.ranks.consensus import RankChannel
from gradscale.torch.step.dispatch import StepMode
from gradscale.torch.step.entries import OptimizerEntry
from gradscale.torch.tensor_list import GradSnapshot, Mark, Numbers, mark_of

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")
_SCALE = ROW.index("scale")


@dataclass
class OptimizerStep:
    """One optimizer's step before `update()`.

    Attributes:
        optimizer: The optimizer; None if only its flags are known. A weak reference
            once the update has ended the step.
        name_sources: Where its parameters' names are looked up.
        mode: How the optimizer is stepped.
        entry: The lasting state of the optimizer; None while a graph is compiled.
        channel: Exchanges statistics with the ranks that decide together; None if this
            rank decides by itself.
        snapshot: The gradients as last collected; None before that.
        accepts_fp16: They were collected with f16 ones accepted.
        scale: f32[], the scale that multiplied the loss of the gradients; None for that
            of the last loss.
        stats: Their statistics, as last read; None if there is no gradient.
        clip: The clip that waits to be folded into the step, or was applied.
        decision: The decision from all of these; None until requested.
        versions: The version of each gradient after it was unscaled or used by a step;
            None while it is as backward left it.
        wrapper_versions: The versions of `snapshot.wrapped`, likewise.
        still_scaled: (skip, scale), f32[] each: where skip is 1, the gradients are
            still multiplied by scale after the step: if a fused optimizer skipped, and
            always for gradscale's own optimizers. None if they are unscaled.
        in_masters: The gradients were unscaled into those of f32 masters, to which
            later statistics and clips refer.
        unscaled_before: It was unscaled before an update, and continues after it.
        flag: The pending copy of the skip to the host, if the optimizer cannot skip by
            itself.
        used_mark: The mark of the first gradient after the step has used it.
        stepped_after: How many backward passes had begun before the step.
        marks: The marks of the gradients when an update found the step unfinished: a
            gradient that was replaced or written to since belongs to another step.
    """

    optimizer: Any = None
    name_sources: tuple[Any, ...] = ()
    mode: StepMode = StepMode.FLAG
    entry: OptimizerEntry | None = None
    channel: RankChannel | None = None
    snapshot: GradSnapshot | None = None
    accepts_fp16: bool = False
    scale: Tensor | None = None
    stats: GradStats | None = None
    clip: Clip | None = None
    decision: Decision | None = None
    versions: Numbers | None = None
    wrapper_versions: list[int] | None = None
    still_scaled: tuple[Tensor, Tensor] | None = None
    in_masters: bool = False
    unscaled_before: bool = False
    flag: AsyncFlag | None = None
    used_mark: Mark | None = None
    stepped_after: int = 0
    marks: list[Mark] | None = None

    def owner(self) -> Any:
        """Return the optimizer; None if only its flags are known, or it is deleted."""
        return self.optimizer() if isinstance(self.optimizer, ref) else self.optimizer

    def release(self) -> None:
        """Release the gradients and the optimizer: only statistics are read later."""
        self.snapshot = None
        # An optimizer with __slots__ has no weak references.
        with suppress(TypeError):
            weak = ref(self.optimizer)
            self.name_sources = tuple(
                weak if source is self.optimizer else source
                for source in self.name_sources
            )
            self.optimizer = weak

    def mark_stepped(self, backwards: int) -> None:
        """Note which gradients the step has used, by the first of them.

        Args:
            backwards: How many backward passes have begun.
        """
        self.stepped_after = backwards
        if self.snapshot is not None and self.snapshot.params:
            first = self.snapshot.params[0].grad
        else:
            first = next((p.grad for p in self.params() if p.grad is not None), None)
        if first is not None and not first.is_inference():
            self.used_mark = mark_of(first)

    def has_used_grads(self) -> bool:
        """Return whether the gradients are those that the step has used."""
        used = self.used_mark
        if used is None or used.tensor() is None or self.owner() is None:
            return False
        grads = (param.grad for param in self.params() if param.grad is not None)
        return used.holds(next(grads, None))

    def mark(self) -> None:
        """Mark the current gradients and their versions."""
        grads = [grad for grad in map(_GRAD, self.params()) if grad is not None]
        self.marks = list(map(mark_of, grads))

    def holds(self) -> bool:
        """Return whether the gradients are those to which `scale` applies."""
        if self.marks is None:
            return self.snapshot is not None and self._is_snapshot(
                self.snapshot.versions
            )
        if self.owner() is None:
            return False
        grads = [grad for grad in map(_GRAD, self.params()) if grad is not None]
        return len(grads) == len(self.marks) and all(map(Mark.holds, self.marks, grads))

    def scale_after_step(self, scale: Tensor) -> Tensor:
        """Return f32[], the scale of the gradients that the ended step has used.

        Args:
            scale: f32[], on the device of the result.
        """
        one = torch.ones_like(scale)
        if self.still_scaled is None:
            return one
        skip, before = self.still_scaled
        if self.entry is not None and self.entry.totals is not None:
            # From the row: the scale of the last loss is overwritten in place.
            before = self.entry.totals.row[_SCALE]
        return torch.where(skip == 0.0, one, before)

    def name_params(self, param_groups: list[dict[str, Any]]) -> None:
        """Replace the parameters by their names.

        Args:
            param_groups: The groups of the optimizer, which is deleted.
        """
        if self.stats is not None:
            sources = *self.name_sources, SimpleNamespace(param_groups=param_groups)
            self.stats.params = names_of(self.stats.params, sources)

    def params(self) -> list[Tensor]:
        """Return all parameters of the optimizer; the list must not be changed.

        Once the gradients were unscaled into masters, return the masters.
        """
        if self.in_masters:
            return self.owner().targets()
        released = isinstance(self.optimizer, ref)
        groups = (self.optimizer() if released else self.optimizer).param_groups
        # The usual optimizer has one group: its list is used as it is.
        if len(groups) == 1 and isinstance(groups[0]["params"], list):
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def owned_params(self) -> list[Tensor]:
        """Return all parameters in the optimizer's groups, even if masters step."""
        groups = self.owner().param_groups
        return [param for group in groups for param in group["params"]]

    def collect(self, allow_fp16: bool) -> None:
        """Collect the gradients, unless the statistics of the last read still hold.

        Args:
            allow_fp16: Accept f16 gradients.
        """
        last = self.snapshot
        if last is not None and self.stats is not None:
            refused = self.accepts_fp16 and not allow_fp16
            if not refused and self._is_snapshot(last.versions):
                return
        self.snapshot = self._snapshot_of_grads(allow_fp16)
        self.accepts_fp16 = allow_fp16
        self.stats = self.decision = None
        if last is not None and self.channel is None and not self.snapshot.present:
            # The gradients were set to None: those to come have another scale.
            self.scale = self.clip = None
        if self.snapshot.wrapped is not None:
            self.wrapper_versions = list(map(_VERSION, self.snapshot.wrapped))

    def read(
        self,
        scale: Tensor,
        *,
        norm_type: float | None = None,
        max_norm: float | None = None,
        unscale: bool = False,
    ) -> None:
        """Read the gradients that were collected; statistics that hold are kept.

        Args:
            scale: f32[], the scale of the gradients.
            norm_type: Also compute the norm of this order.
            max_norm: A kernel may decide on a clip to this 2-norm along with the read.
            unscale: `unscale_` follows: a kernel may do its work along with the read.
        """
        if self.stats is not None:
            if norm_type is None:
                return
            # As backward left them: their statistics still hold.
            known = self.stats.with_norm(norm_type) if self.versions is None else None
            if known is not None:
                self.stats, self.decision = known, None
                return
        self.stats = self.decision = None
        assert self.snapshot is not None
        # With other ranks always 2: a further exchange costs more than the norm.
        order = 2.0 if norm_type is None and self.channel is not None else norm_type
        if self.snapshot.tensors:
            limit = max_norm if self.clip is None else None
            reader = None if self.entry is None else self.entry.reader
            # Masters are unscaled out of place; a clip, and other ranks, decide later.
            may_unscale = self.mode is not StepMode.MASTERS and self.clip is None
            unscale = unscale and may_unscale and self.channel is None
            self.stats = read(
                self.snapshot,
                scale.device,
                order,
                reader,
                scale,
                limit,
                unscale=unscale,
            )
            self.decision = self.stats.decision
        if self.channel is not None and order is not None:
            # A rank without gradients still takes part: the others would wait for it.
            mine = self.stats or GradStats([], [], scale.device, order)
            self.stats = self.channel.agree(mine, order)
            self.decision = None

    def _snapshot_of_grads(self, allow_fp16: bool) -> GradSnapshot:
        channel, params = self.channel, self.params()
        try:
            snapshot = collect(
                params,
                allow_fp16=allow_fp16,
                names=self.name_sources,
                copies=None if channel is None else channel.copies,
            )
        except GradientError:
            if channel is not None:
                channel.refuse()
            raise
        if self.in_masters:
            names = dict(zip(map(id, params), self.owned_params(), strict=True))
            owners = [names[id(master)] for master in snapshot.params]
            return snapshot._replace(params=owners)
        # In this order: torch.compile of PyTorch 2.11 cannot compare lists by identity.
        if torch.compiler.is_compiling() or snapshot.params is not params:
            return snapshot
        # A copy: the list of a group may be changed before the outcome is read.
        return snapshot._replace(params=list(params))

    def norm_of_unscaled(
        self, norm_type: float, one: Tensor, *, allow_fp16: bool
    ) -> Tensor | None:
        """Return the norm of gradients that were unscaled; None without gradients.

        Args:
            norm_type: Its order.
            one: f32[], 1.
            allow_fp16: Accept f16 gradients.
        """
        known = self._known_norm(norm_type)
        if known is not None:
            return known
        if self.channel is None and not any(
            param.grad is not None for param in self.params()
        ):
            # The snapshot shows that there were gradients when they were unscaled.
            return None
        made = self.decision
        self.collect(allow_fp16)
        self.read(one, norm_type=norm_type)
        self.decision = made
        return None if self.stats is None else self.stats.norm

    def _known_norm(self, norm_type: float) -> Tensor | None:
        """Return the norm of gradients that were unscaled, if all ranks know it.

        None if a gradient was written to since, or another norm was taken before.
        """
        stats = None if self.stats is None else self.stats.with_norm(norm_type)
        if stats is None or stats.agreed is None or self.decision is None:
            return None
        if not self._is_snapshot(self.versions):
            return None
        return stats.agreed.norm * self.decision.multiplier

    def decide(
        self, scale: Tensor, *, divide: bool, inv_scale: Tensor | None = None
    ) -> Decision:
        """Return the decision on the gradients that were read. No host sync.

        Args:
            scale: f32[], the scale of the gradients.
            divide: The optimizer divides by `grad_scale`; else they are multiplied by
                `multiplier`, which may differ in the last bit.
            inv_scale: f32[], the factor instead of `1 / scale`.
        """
        if self.decision is None:
            clip, stats = self.clip, self.stats
            # Division in f32 is correctly rounded; exact for powers of two.
            multiplier = scale.reciprocal() if inv_scale is None else inv_scale
            grad_scale = scale
            if clip is not None:
                multiplier, grad_scale = multiplier * clip.coef, scale / clip.coef
            if stats is None:
                # No gradient has an element.
                skip = nonfinite = amax = torch.zeros_like(scale)
            else:
                factor = grad_scale if divide else multiplier
                skip = nonfinite = stats.nonfinite(factor, divide=divide)
                amax = stats.amax()
            if clip is not None:
                skip = torch.maximum(nonfinite, clip.norm_unusable)
            self.decision = Decision(
                nonfinite=nonfinite,
                norm_unusable=None if clip is None else clip.norm_unusable,
                skip=skip,
                amax=amax,
                norm=None if clip is None else clip.norm,
                coef=None if clip is None else clip.coef,
                multiplier=multiplier,
                grad_scale=grad_scale,
            )
        return self.decision

    def take_clip(self, made: Decision) -> Tensor:
        """Take the clip that a kernel has decided on; return the norm."""
        assert made.norm is not None
        assert made.coef is not None
        assert made.norm_unusable is not None
        self.clip = Clip(made.norm, made.coef, made.norm_unusable)
        return made.norm

    def add_clip(self, clip: Clip, *, unscaled: bool) -> None:
        """Fold a clip into the step; unscaled gradients are clipped at once."""
        self.clip = clip if self.clip is None else clip.after(self.clip)
        if not unscaled:
            self.decision = None
            return
        assert self.snapshot is not None
        multiply_(
            self.snapshot.originals or self.snapshot.tensors,
            clip.coef,
            self.snapshot.kind,
        )
        self.clip = self.clip.applied()
        self.mark_unscaled()

    def check_again(self, flags: dict[Any, Tensor], skip: Tensor) -> dict[Any, Tensor]:
        """Read unscaled gradients once more; return the skip by device.

        Args:
            flags: The skip for each device.
            skip: f32[], these flags as one.
        """
        before, ones = self.decision, torch.ones_like(skip)
        self.collect(allow_fp16=True)
        self.read(ones)
        if self.stats is None:
            return flags
        nonfinite = self.stats.nonfinite(ones)
        skip = torch.maximum(skip, nonfinite)
        if before is not None:
            # `amax` stays that of the scaled gradients.
            self.decision = before._replace(
                nonfinite=torch.maximum(before.nonfinite, nonfinite),
                skip=skip,
                multiplier=ones,
            )
        return {device: skip.to(device, non_blocking=True) for device in flags}

    def also_skip(self, norm_unusable: Tensor) -> None:
        """Skip a step that was decided before, where a norm is not usable."""
        if self.decision is not None:
            skip = torch.maximum(self.decision.skip, norm_unusable)
            if self.decision.norm_unusable is not None:
                norm_unusable = torch.maximum(
                    self.decision.norm_unusable, norm_unusable
                )
            self.decision = self.decision._replace(
                norm_unusable=norm_unusable, skip=skip
            )

    def _is_snapshot(self, versions: Numbers | None) -> bool:
        """Return whether the gradients are those collected, with these versions."""
        last = self.snapshot
        if last is None or versions is None or torch.compiler.is_compiling():
            return False
        params = self.params()
        if last.wrapped is None:
            return tensor_list.are_grads(params, last, versions)
        # A write to a DTensor increments its own version, not that of its local part.
        present = [grad for grad in map(_GRAD, params) if grad is not None]
        return (
            tensor_list.same(present, last.wrapped)
            and tensor_list.addresses(last.tensors) == last.addresses
            and tensor_list.versions(last.originals or last.tensors) == versions
            and list(map(_VERSION, last.wrapped)) == self.wrapper_versions
        )

    def mark_unscaled(
        self, still_scaled: tuple[Tensor, Tensor] | None = None, *, written: bool = True
    ) -> None:
        """Mark the gradients as unscaled, except for `still_scaled`.

        Args:
            still_scaled: See the attribute.
            written: They may have been written to since they were collected.
        """
        self.still_scaled = still_scaled
        if self.snapshot is not None and not torch.compiler.is_compiling():
            self.versions = self.snapshot.versions
            if written:
                self.versions = tensor_list.versions(
                    self.snapshot.originals or self.snapshot.tensors
                )
                if self.snapshot.wrapped is not None:
                    self.wrapper_versions = list(map(_VERSION, self.snapshot.wrapped))

    def unscale_(self, others: Iterable["OptimizerStep"], multiplier: Tensor) -> None:
        """Multiply the gradients in place, except those that another step unscaled.

        Raises:
            GradientError: One of them was unscaled with another optimizer and written
                to since, so whether it is scaled is not known.
        """
        assert self.snapshot is not None
        unscaled = {
            tensor.data_ptr(): (version, other.still_scaled)
            for other in others
            if other.snapshot is not None and other.versions is not None
            for tensor, version in zip(
                other.snapshot.originals or other.snapshot.tensors,
                other.versions,
                strict=True,
            )
        }
        if self.mode is StepMode.MASTERS:
            for param, tensor in zip(
                self.snapshot.params, self.snapshot.tensors, strict=True
            ):
                if tensor.data_ptr() in unscaled:
                    raise _two_owners(names_of([param], self.name_sources)[0])
            self.optimizer.unscale_to_masters(multiplier)
            self.in_masters = True
            self.snapshot = self._snapshot_of_grads(allow_fp16=False)
            self.mark_unscaled()
            return
        if self.stats is not None and self.stats.unscaled:
            tensor_list.note_writes(self.snapshot.tensors)
            self.mark_unscaled()
            return
        if not unscaled:
            multiply_(
                self.snapshot.originals or self.snapshot.tensors,
                multiplier,
                self.snapshot.kind,
            )
            self.mark_unscaled()
            return
        fresh, rest = [], []
        pairs = zip(
            self.snapshot.params,
            self.snapshot.originals or self.snapshot.tensors,
            strict=True,
        )
        for param, tensor in pairs:
            version, still_scaled = unscaled.get(tensor.data_ptr(), (None, None))
            if version is None:
                fresh.append(tensor)
            elif version != tensor._version:
                raise _two_owners(names_of([param], self.name_sources)[0])
            elif still_scaled is not None:
                rest.append((tensor, still_scaled))
        multiply_(fresh, multiplier)
        for tensor, (skip, scale) in rest:
            multiply_([tensor], torch.where(skip == 0.0, 1.0, scale.reciprocal()))
        self.mark_unscaled()

    def culprits(self) -> list[str]:
        """Return the names of the parameters that were not finite. Syncs."""
        if self.stats is None or self.decision is None:
            return []
        bad = self.stats.culprits(self.decision.multiplier)
        return names_of(bad, self.name_sources)

    def shares_with(self, others: Iterable["OptimizerStep"]) -> bool:
        """Return whether another step has unscaled gradients of this optimizer."""
        used = [
            id(param)
            for other in others
            if other.versions is not None and other.snapshot is not None
            for param in other.snapshot.params
        ]
        if not used:
            return False
        return not {id(param) for param in self.params()}.isdisjoint(used)


def _two_owners(name: str) -> GradientError:
    return GradientError(
        f"{name} belongs to two optimizers; its gradient was unscaled with the first "
        "and written to since. Whether it is scaled now cannot be determined. Call "
        "update() between the two steps, or give each parameter to one optimizer.",
        code="GS106",
    )
