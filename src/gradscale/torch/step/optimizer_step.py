"""One optimizer's step, from the first touch to the update."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import GradientError
from gradscale.torch import tensor_list
from gradscale.torch.device_state.flag import Flag
from gradscale.torch.devices import moved
from gradscale.torch.grads.clip import Clip
from gradscale.torch.grads.collect import gather
from gradscale.torch.grads.stats import Reading, largest, read
from gradscale.torch.kernels.decision import Decision
from gradscale.torch.kernels.readers import Reader
from gradscale.torch.names import names_of
from gradscale.torch.ranks.consensus import Voice
from gradscale.torch.tensor_list import GradSnapshot

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")


@dataclass
class OpenStep:
    """One optimizer's step before `update()`.

    Attributes:
        optimizer: Whose step it is; None if only its flags are known.
        names: Where its parameters' names are looked up.
        params_before: Those of the gradients of its last step, if there was one.
        reader: What reads its gradients by kernels; None for plain operations.
        voice: How to speak to the ranks that decide together; None for one alone.
        furnished: Reader and voice are there, as far as there are any.
        gradients: As last gathered; None before that.
        accepts_fp16: They were gathered with f16 ones accepted.
        reading: What they showed when they were last read.
        versions: The version of each gradient after it was unscaled or stepped on;
            None while it is as backward left it.
        wrappers: The versions of `gradients.wrapped`, taken along with the others.
        leftover: (skip, scale), f32[] each: where skip is 1 the gradients are still
            scaled, as a fused optimizer leaves them that skipped, and one of our own
            in any case. None if they are unscaled in any case.
        just_read: The reading is of this very call: nobody can have changed anything.
        decision: What a kernel has made of the reading and of `clip`.
        clip: The clip that waits to be folded into the step, or was applied.
        found: f32[], 1 if an element was not finite on any rank, else 0.
        norm_found: f32[], 1 if a norm was not usable on any rank, else 0.
        amax: f32[], the largest magnitude on any rank.
        multiplier: f32[], what the gradients were or were to be multiplied by.
        divisor: f32[], what an optimizer that unscales itself is to divide by; None
            before it was judged.
        scale: f32[], the scale behind the gradients where it is not the one that
            multiplied the last loss.
        unscaled_before: It was unscaled before an update, and is taken up after it.
        skip: f32[], exactly 1 if the step is to be skipped, else 0, as it was judged;
            None if that is not known.
        flag: The decision on its way to the host, for an optimizer that must be told.
    """

    optimizer: Any = None
    names: tuple[Any, ...] = ()
    params_before: list[Tensor] | None = None
    reader: Reader | None = None
    voice: Voice | None = None
    furnished: bool = False
    gradients: GradSnapshot | None = None
    accepts_fp16: bool = False
    reading: Reading | None = None
    just_read: bool = False
    versions: tensor_list.Numbers | None = None
    wrappers: list[int] | None = None
    leftover: tuple[Tensor, Tensor] | None = None
    decision: Decision | None = None
    clip: Clip | None = None
    found: Tensor | None = None
    norm_found: Tensor | None = None
    amax: Tensor | None = None
    multiplier: Tensor | None = None
    divisor: Tensor | None = None
    scale: Tensor | None = None
    unscaled_before: bool = False
    skip: Tensor | None = None
    flag: Flag | None = None

    def params(self) -> list[Tensor]:
        """Return all parameters of the optimizer, not to be changed."""
        groups = self.optimizer.param_groups
        # The usual optimizer has one group: its list is looked at as it is.
        if len(groups) == 1 and isinstance(groups[0]["params"], list):
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def read(
        self, *, allow_fp16: bool, home: torch.device, norm_type: float | None = None
    ) -> GradSnapshot:
        """Bring the reading up to date; one that still holds is kept."""
        gradients, held = self.gradients, self.reading
        if gradients is None or held is None or not self._untouched(allow_fp16):
            gradients = self._gather(allow_fp16)
            self.gradients, self.accepts_fp16 = gradients, allow_fp16
            self.wrappers = _versions_of(gradients.wrapped)
        elif norm_type is None:
            return gradients
        elif self.versions is None:
            # As backward left them: what was read of them still holds.
            known = held.with_norm(norm_type)
            if known is not None:
                self.reading = known
                return gradients
        self.reading = self.decision = None
        # A further exchange costs more than a norm that nobody asks for.
        order = 2.0 if norm_type is None and self.voice is not None else norm_type
        if gradients.tensors:
            self.reading = read(gradients, home, order, self.reader)
        if self.voice is not None and order is not None:
            # A rank without gradients still takes part: the others would wait for it.
            mine = self.reading or Reading([], [], home, order)
            self.reading = self.voice.agree(mine, order)
        return gradients

    def _gather(self, allow_fp16: bool) -> GradSnapshot:
        voice, params = self.voice, self.params()
        try:
            found = gather(
                params,
                allow_fp16=allow_fp16,
                names=self.names,
                copies=None if voice is None else voice.copies,
            )
        except GradientError:
            if voice is not None:
                voice.refuse()
            raise
        # In this order: torch.compile of PyTorch 2.11 cannot tell lists apart.
        if torch.compiler.is_compiling() or found.params is not params:
            return found
        # The list of a group may be changed before a failed step is told of. A copy of
        # thousands that other threads have just looked at takes 0.1 ms.
        before = self.params_before
        kept = before if before and tensor_list.same(before, params) else list(params)
        return found._replace(params=kept)

    def unscaled_norm(self, norm_type: float) -> Tensor | None:
        """Return the norm of gradients that were unscaled, if all ranks know it.

        None if a gradient was touched since, or another norm was taken before.
        """
        reading = None if self.reading is None else self.reading.with_norm(norm_type)
        if reading is None or reading.agreed is None or self.multiplier is None:
            return None
        if not self._are_gathered(self.versions):
            return None
        return reading.agreed.norm * self.multiplier

    def decide(self, scale: Tensor, max_norm: float | None) -> Decision | None:
        """Let one kernel make all of the reading, if it can; return what it made.

        Args:
            scale: f32[], the scale behind the gradients.
            max_norm: Also clip by this 2-norm; None without a clip.
        """
        self.decision = None
        facts = None if self.reading is None else self.reading.lone_facts()
        if self.clip is None and facts is not None and self.reader is not None:
            self.decision = self.reader.decide(facts, scale, max_norm)
        if self.decision is not None and max_norm is not None:
            made = self.decision
            self.clip = Clip(made.norm, made.coef, made.norm_found)
        return self.decision

    def _untouched(self, allow_fp16: bool) -> bool:
        """Return whether the gradients are the very ones that were gathered last."""
        assert self.gradients is not None
        if self.accepts_fp16 > allow_fp16:
            return False
        return self._are_gathered(self.gradients.versions)

    def _are_gathered(self, versions: tensor_list.Numbers | None) -> bool:
        """Return whether the gradients are those gathered, and of these versions."""
        last = self.gradients
        if last is None or versions is None or torch.compiler.is_compiling():
            return False
        params = self.params()
        if last.wrapped is None:
            return tensor_list.untouched(params, last.tensors, last.addresses, versions)
        # A write to a DTensor is told by itself, not by its local part.
        present = [grad for grad in map(_GRAD, params) if grad is not None]
        return (
            tensor_list.same(present, last.wrapped)
            and tensor_list.addresses(last.tensors) == last.addresses
            and tensor_list.versions(last.tensors) == versions
            and _versions_of(last.wrapped) == self.wrappers
        )

    def look(
        self,
        multiplier: Tensor,
        found_inf: Tensor | None,
        *,
        grad_scale: Tensor | None,
        params_clip: Clip | None,
    ) -> dict[torch.device, Tensor]:
        """Judge the reading; return whether to skip, for each of the devices.

        Args:
            multiplier: f32[] or f32[1], what the gradients are or will be multiplied
                by; what overflows by it counts as not finite.
            found_inf: f32[] or f32[1], 1 if the step is to be skipped anyway; None is
                0.
            grad_scale: f32[], what the optimizer will divide by, if it does so itself.
            params_clip: A clip of bare parameters, which may ask for a skip too.

        Returns:
            f32 of `found_inf`'s shape, 0 or 1; nothing if there is no gradient at all.
        """
        gradients = self.gradients
        assert gradients is not None
        if gradients.present == 0 and self.voice is None:
            return {}
        self.multiplier = multiplier if multiplier.dim() == 0 else multiplier.view(())
        made = self.decision
        if made is not None and multiplier is not made.multiplier:
            made = None
        if self.reading is None:
            self.found = self.amax = torch.zeros_like(self.multiplier)
        elif made is not None:
            self.found, self.amax = made.found, made.amax
        else:
            divide = grad_scale is not None
            factor = self.multiplier if grad_scale is None else grad_scale
            self.found = self.reading.found(factor, divide=divide)
            self.amax = self.reading.amax()
        clips = [clip.found for clip in (self.clip, params_clip) if clip is not None]
        self.norm_found = largest(clips) if clips else None
        if made is not None and params_clip is found_inf is None:
            self.skip = made.skip
            return {made.skip.device: made.skip}
        flags = [f for f in (self.found, self.norm_found, found_inf) if f is not None]
        found = reduce(torch.maximum, flags)
        # Flags from elsewhere may be sums.
        self.skip = found if found_inf is None else None
        devices = () if self.reading is None else self.reading.devices
        return {device: moved(found, device) for device in devices or (found.device,)}

    def seen(self) -> GradSnapshot | None:
        """Return the gradients for an optimizer that need not look again."""
        found = self.gradients
        if found is None or found.kind is None:
            return None
        return found

    def close(
        self, leftover: tuple[Tensor, Tensor] | None = None, *, written: bool = True
    ) -> None:
        """Note that the gradients are unscaled from here on, but for `leftover`.

        Args:
            leftover: See the attribute.
            written: Somebody may have written to them since they were gathered.
        """
        self.leftover = leftover
        if self.gradients is not None and not torch.compiler.is_compiling():
            self.versions = self.gradients.versions
            if written:
                self.versions = tensor_list.versions(self.gradients.tensors)
                self.wrappers = _versions_of(self.gradients.wrapped)

    def culprits(self) -> list[str]:
        """Return the names of the parameters that were not finite. Syncs."""
        if self.reading is None or self.multiplier is None:
            return []
        return names_of(self.reading.culprits(self.multiplier), self.names)

    def shares_with(self, others: Iterable["OpenStep"]) -> bool:
        """Return whether another step has unscaled gradients of this optimizer."""
        closed = [
            id(param)
            for other in others
            if other.versions is not None and other.gradients is not None
            for param in other.gradients.params
        ]
        if not closed:
            return False
        return not {id(param) for param in self.params()}.isdisjoint(closed)


def _versions_of(tensors: list[Tensor] | None) -> list[int] | None:
    return None if tensors is None else list(map(_VERSION, tensors))
