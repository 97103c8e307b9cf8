"""The steps of all optimizers between two updates."""

import weakref
from collections import defaultdict
from contextlib import suppress
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.errors import GradientError
from gradscale.torch.device_state.update import StepSummary
from gradscale.torch.devices import can_touch_host, to_device
from gradscale.torch.grads.clip import Clip
from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.stats import largest
from gradscale.torch.grads.unscale import multiply_
from gradscale.torch.step.dispatch import mode_of
from gradscale.torch.step.entries import OptimizerEntries
from gradscale.torch.step.first_backwards import FirstBackwards
from gradscale.torch.step.optimizer_step import OptimizerStep
from gradscale.torch.tensor_list import Mark, mark_of


def fresh_state() -> dict[str, Any]:
    """Return the entry of an optimizer in torch's table before its first call."""
    # Equal to torch's own, which torch.compile would refuse to call.
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def skip_of(
    flags: dict[Any, Tensor], step: OptimizerStep, home: torch.device
) -> Tensor:
    """Return f32[], exactly 0 or 1: the flags of all devices as one.

    Args:
        flags: By device, as torch's table has them.
        step: Its own decision is returned unchanged.
        home: The device of the result.
    """
    given = list(flags.values())
    own = None if step.decision is None else step.decision.skip
    if len(given) == 1 and given[0] is own and own.device == home:
        return own
    # Flags written by other code may be sums: only 0 and 1 are defined.
    return largest([to_device(flag.reshape(()), home) for flag in given]).clamp(0, 1)


class Carried(NamedTuple):
    """A step that an `update()` found unfinished, and its stage and flags."""

    step: OptimizerStep
    state: dict[str, Any]

    def is_closed(self) -> bool:
        """Return whether no backward should add to the gradients any more."""
        unscaled = self.state["stage"] is OptState.UNSCALED
        return unscaled or self.step.clip is not None


class Stray(NamedTuple):
    """A gradient of no known optimizer, as first found by an update.

    Attributes:
        mark: The gradient and its version.
        scale: f32[], its scale.
    """

    mark: Mark
    scale: Tensor


class Iteration:
    """The optimizers that were touched since the last update.

    Attributes:
        states: Torch's own table: stage and flags by the optimizer's id.
        steps: Their steps, by the same key.
        params_clips: Clips of bare parameters, each with the ids of these.
        scaled: A loss was scaled since the last update.
        noted: The last one was noted in the device state, which is impossible in a
            transform of `torch.func`.
        losses: How many scalar losses were scaled since the last update.
        backwards: How many backward passes of scaled losses have begun.
        carried: Steps that an update found unfinished, by the same key.
        settled: The steps behind the last outcome; empty before the first.
        used: The last step of each optimizer, while the gradients that it has used may
            still exist.
        first: No update was made yet.
        leaves: Weak references to the leaves of the losses before the first update, by
            id; after it, without those of known optimizers.
        strays: Their gradients that an update has found, by the same key.
        first_backwards: Checks the origin of their gradients before the first update.
        ended: The keys of the steps that the last update has ended; none if it only
            set the scale.
    """

    def __init__(self) -> None:
        self.settled: dict[int, OptimizerStep] = {}
        self.ended: set[int] = set()
        self.carried: dict[int, Carried] = {}
        self.used: dict[int, OptimizerStep] = {}
        self.first = True
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        self.strays: dict[int, Stray] = {}
        self.first_backwards = FirstBackwards()
        self.renew()

    def renew(self) -> None:
        """Forget everything since the last update."""
        self.states: dict[int, dict[str, Any]] = defaultdict(fresh_state)
        self.steps: dict[int, OptimizerStep] = {}
        self.params_clips: list[tuple[frozenset[int], Clip]] = []
        self.scaled = False
        self.noted = True
        self.losses = self.backwards = 0

    def replace_states(self, states: dict[int, dict[str, Any]]) -> None:
        """Replace the table of states, by which other code ends the iteration."""
        self.ended = set(self.steps)
        self.renew()
        self.states = states

    def abandon(self) -> None:
        """Also forget the steps that an update found unfinished."""
        self.carried = {}
        self.renew()

    def open(self, optimizer: Any, model: Any) -> OptimizerStep:
        """Return the optimizer's step; an unfinished one continues."""
        key = id(optimizer)
        if key not in self.steps:
            carried = self.carried.pop(key, None)
            if carried is not None and carried.step.holds():
                self.steps[key], self.states[key] = carried.step, carried.state
                carried.step.optimizer = optimizer
                carried.step.name_sources = (model, optimizer)
                carried.step.unscaled_before = (
                    self.stage(carried.step) is OptState.UNSCALED
                )
            else:
                sources = (model, optimizer)
                self.steps[key] = OptimizerStep(optimizer, sources, mode_of(optimizer))
        return self.steps[key]

    def resume(self, params: list[Tensor], model: Any) -> None:
        """Continue every unfinished step that has any of the parameters."""
        wanted = {id(param) for param in params}
        for carried in list(self.carried.values()):
            if not wanted.isdisjoint(id(param) for param in carried.step.params()):
                self.open(carried.step.owner(), model)

    def forget(self, optimizer: Any) -> None:
        """Forget one optimizer; with the last one, the iteration."""
        self.forget_one(id(optimizer))
        if not self.steps:
            self.renew()

    def forget_one(self, key: int) -> None:
        """Forget the step of one optimizer."""
        self.states.pop(key, None)
        self.steps.pop(key, None)
        self.carried.pop(key, None)

    def forget_cleared(self) -> None:
        """Forget unscaled or clipped steps whose gradients were all set to None."""
        for step in self.unscaled() + self.clipped():
            # A step that was carried over has released its snapshot.
            had_some = step.marks if step.snapshot is None else step.snapshot.present
            if had_some and all(param.grad is None for param in step.owned_params()):
                key = id(step.optimizer)
                self.steps.pop(key)
                # The flags stay: an update without a step moves the scale by them.
                self.states[key]["stage"] = OptState.READY

    def stage(self, step: OptimizerStep) -> OptState:
        """Return the stage of the step, as torch names it."""
        return self.states[id(step.optimizer)]["stage"]

    def scale_of_grads(
        self, step: OptimizerStep, scale: Tensor, used_scale: Tensor
    ) -> Tensor:
        """Return f32[], the scale that multiplied the loss of a step's gradients.

        If an earlier step has already used the gradients, it is 1 or an older scale.
        After an `update()` without a new `scale()`, it is the scale before the update,
        unless the update ended a step of this optimizer. Its gradients are then those
        of a replayed graph or of a manually scaled loss, at the current scale.

        Args:
            step: Keeps the scale, unless it is that of the last loss.
            scale: f32[], the current scale.
            used_scale: f32[], the scale that multiplied the last loss.
        """
        if step.scale is not None:
            return step.scale
        before = self.used.get(id(step.optimizer))
        # Spares the call if the gradients were set to None since.
        if (
            before
            and before.used_mark
            and before.used_mark.tensor() is not None
            and before.has_used_grads()
            # A captured graph writes new gradients into the same memory.
            and can_touch_host()
        ):
            step.scale = before.scale_after_step(scale)
            return step.scale
        if self.scaled and self.noted:
            return used_scale
        from_elsewhere = self.scaled or id(step.optimizer) in self.ended
        grads_scale = scale if from_elsewhere else used_scale
        if step.snapshot is not None and not step.snapshot.present:
            # The gradients of the step are still to come.
            return grads_scale
        # A copy: another optimizer's loss may be scaled before this step is taken.
        step.scale = grads_scale.clone()
        return step.scale

    def summaries(
        self, entries: OptimizerEntries, used_scale: Tensor, home: torch.device
    ) -> tuple[list[StepSummary], list[int]]:
        """Return the step of each optimizer, and the keys of those without one.

        Args:
            entries: Their totals are written by the update.
            used_scale: f32[], the scale that multiplied the last loss.
            home: The device of the update.
        """
        summaries, idle = [], []
        for key, entry in self.states.items():
            flags, stage = entry["found_inf_per_device"], entry["stage"]
            if flags:
                step = self.steps.get(key) or OptimizerStep()
                made, clip = step.decision, step.clip
                if clip is None and self.params_clips:
                    clip = self.params_clip_of(step)
                skip = skip_of(flags, step, home)
                totals = None if step.entry is None else step.entry.totals
                summaries.append(
                    StepSummary(
                        totals=totals or entries.totals_of(key),
                        scale=used_scale if step.scale is None else step.scale,
                        stepped=stage is OptState.STEPPED,
                        skip=skip,
                        nonfinite=skip if made is None else made.nonfinite,
                        norm_unusable=None if made is None else made.norm_unusable,
                        norm=None if clip is None else clip.norm,
                        amax=None if made is None else made.amax,
                    )
                )
            elif stage is not OptState.READY and key in self.steps:
                idle.append(key)
        return summaries, idle

    def decide(
        self, step: OptimizerStep, scale: Tensor, *, divide: bool
    ) -> dict[torch.device, Tensor]:
        """Decide on gradients that were read; return the skip for each device."""
        assert step.snapshot is not None
        if step.snapshot.present == 0 and step.channel is None:
            return {}
        skip = step.decide(scale, divide=divide).skip
        clip = self.params_clip_of(step) if self.params_clips else None
        if clip is not None:
            step.also_skip(clip.norm_unusable)
            skip = torch.maximum(skip, clip.norm_unusable)
        kinds = () if step.stats is None else step.stats.kinds
        devices = {kind.device for kind in kinds}
        if devices <= {skip.device}:
            return {skip.device: skip}
        return {device: skip.to(device, non_blocking=True) for device in devices}

    def ended_in_last(self, params: list[Tensor]) -> bool:
        """Return whether the last update ended steps of all these parameters."""
        ended = {
            id(param)
            for key, step in self.settled.items()
            if key in self.ended and step.owner() is not None
            for param in step.params()
        }
        return ended.issuperset(id(param) for param in params)

    def params_clip_of(self, step: OptimizerStep) -> Clip | None:
        """Return the clips of bare parameters that count for this step, as one."""
        if not self.params_clips:
            return None
        clips = [clip for ids, clip in self.params_clips if self.affects(ids, step)]
        if not clips:
            return None
        return reduce(lambda earlier, clip: clip.after(earlier), clips)

    def affects(self, ids: frozenset[int], step: OptimizerStep) -> bool:
        """Return whether parameters belong to this step, or to no known optimizer.

        The latter may have been copied to the parameters of any optimizer.
        """
        if step.owner() is None or _has_any(step, ids):
            return True
        known = chain(self.steps.values(), self.settled.values())
        return not any(
            _has_any(other, ids) for other in known if other.owner() is not None
        )

    def drop(self, key: int, param_groups: list[dict[str, Any]]) -> None:
        """Release the parameters of a deleted optimizer."""
        if key in self.settled:
            self.settled[key].name_params(param_groups)
        self.carried.pop(key, None)
        self.used.pop(key, None)

    def unscaled(self) -> list[OptimizerStep]:
        """Return the steps whose gradients are unscaled and not yet used."""
        return [s for s in self.steps.values() if self.stage(s) is OptState.UNSCALED]

    def clipped(self) -> list[OptimizerStep]:
        """Return the steps with a clip that is applied once they are unscaled."""
        return [
            step
            for step in self.steps.values()
            if self.stage(step) is OptState.READY and step.clip is not None
        ]

    def closed_params(self) -> list[Tensor]:
        """Return the parameters to whose gradients no backward should add."""
        carried = [
            one.step
            for one in self.carried.values()
            if one.is_closed() and one.step.holds()
        ]
        return params_of(self.unscaled() + self.clipped() + carried)

    def bring_to(self, scale: Tensor) -> None:
        """Rescale pending gradients to the scale of a new loss.

        Its backward pass may add to them. No host sync.

        Args:
            scale: f32[], the scale of the loss.
        """
        waiting = [one.step for one in self.carried.values() if not one.is_closed()]
        self.carried = {k: one for k, one in self.carried.items() if one.is_closed()}
        for step in self.steps.values():
            if self.stage(step) is OptState.READY and step.clip is None:
                waiting.append(step)
        # Check all before writing to any: optimizers may share a parameter.
        held = [step for step in waiting if step.scale is not None and step.holds()]
        done: set[int] = set()
        for step in held:
            assert step.scale is not None
            params = [param for param in step.params() if id(param) not in done]
            done.update(map(id, params))
            rescale_(params, scale / step.scale)
        for step in waiting:
            step.scale = None
        for key, stray in list(self.strays.items()):
            leaf = self.leaves[key]() if key in self.leaves else None
            grad = None if leaf is None else leaf.grad
            if leaf is not None and grad is not None and stray.mark.holds(grad):
                rescale_([leaf], scale / stray.scale)
                del self.strays[key]

    def also_skip(self, step: OptimizerStep, norm_unusable: Tensor) -> None:
        """Skip a step that was decided before, where a norm is not usable."""
        step.also_skip(norm_unusable)
        flags = self.states[id(step.optimizer)]["found_inf_per_device"]
        for device, skip in flags.items():
            flags[device] = torch.maximum(skip, to_device(norm_unusable, device))

    def end(self, used_scale: Tensor, entries: OptimizerEntries) -> None:
        """End the steps that were unscaled or taken; carry over the others.

        Args:
            used_scale: f32[], the scale that multiplied the last loss.
            entries: Optimizers that were not called since the last update may have
                gradients too, which keep their scale.
        """
        if self.carried and not torch.compiler.is_compiling():
            held = [key for key, old in self.carried.items() if old.step.holds()]
            self.carried = {key: self.carried[key] for key in held}
        if self.scaled and not torch.compiler.is_compiling():
            for optimizer in entries.others({*self.steps, *self.carried}):
                before = self.used.get(id(optimizer))
                self.open(optimizer, None)
                if before is not None and before.has_used_grads():
                    # Those of a step that was taken.
                    self.forget_one(id(optimizer))
        touched = [
            key
            for key, state in self.states.items()
            if state["stage"] is not OptState.READY or state["found_inf_per_device"]
        ]
        carried: list[OptimizerStep] = []
        if not torch.compiler.is_compiling():
            carried = self._carry(used_scale)
            if self.leaves or self.first:
                self._note_strays(used_scale, entries)
        self.ended = set(touched)
        settled = [self.steps.get(key) or OptimizerStep() for key in touched]
        if touched:
            self.settled = dict(zip(touched, settled, strict=True))
        self.renew()
        # Last: a step that Ctrl-C had left both open and released could not be taken.
        for step in carried + settled:
            step.release()

    def _note_strays(self, used_scale: Tensor, entries: OptimizerEntries) -> None:
        groups = [g for each in entries.others(()) for g in each.param_groups]
        known = {id(param) for group in groups for param in group["params"]}
        there = {key: ref() for key, ref in self.leaves.items() if key not in known}
        self.leaves = {
            k: self.leaves[k] for k, leaf in there.items() if leaf is not None
        }
        # Until an optimizer is known, leaves of later losses are noted too.
        self.first, scale = not groups, used_scale.clone()
        self.first_backwards.close()
        for key, leaf in there.items():
            grad, stray = None if leaf is None else leaf.grad, self.strays.get(key)
            if grad is not None and (stray is None or not stray.mark.is_of(grad)):
                self.strays[key] = Stray(mark_of(grad), scale)

    def adopt(self, step: OptimizerStep, scale: Tensor) -> list[Tensor]:
        """Rescale the gradients of a newly seen optimizer to the current scale.

        Args:
            step: Its first step.
            scale: f32[], the scale of the last loss.

        Returns:
            The parameters whose gradients were written to since the first update that
            found them: perhaps sums of two scales.
        """
        written = []
        for param in step.params():
            stray, grad = self.strays.pop(id(param), None), param.grad
            if stray is None or grad is None or not stray.mark.is_of(grad):
                continue
            if stray.mark.holds(grad):
                rescale_([param], scale / stray.scale)
            # Syncs, once per parameter.
            elif bool(scale != stray.scale):
                written.append(param)
        return written

    def _carry(self, used_scale: Tensor) -> list[OptimizerStep]:
        """Carry over the steps whose gradients are still to be used; return them."""
        carried = []
        for key, step in self.steps.items():
            state = self.states[key]
            if state["stage"] is OptState.STEPPED:
                if step.used_mark is not None:
                    self.used[key] = step
                if step.stepped_after == self.backwards or step.has_used_grads():
                    continue
                # A backward pass since then has made gradients of the next step.
                step = OptimizerStep(step.optimizer, step.name_sources, step.mode)
                state = fresh_state()
            if not state["found_inf_per_device"]:
                # It may have been unscaled before there was a gradient.
                state = fresh_state()
            if step.scale is None:
                step.scale = used_scale.clone()
            step.mark()
            if step.marks:
                carried.append(step)
                self.carried[key] = Carried(step, state)
        return carried


def rescale_(params: list[Tensor], factor: Tensor) -> None:
    """Multiply the gradients of parameters in place. No host sync."""
    # Invalid gradients raise an error when they are read.
    with suppress(GradientError):
        snapshot = collect(params, allow_fp16=True)
        grads = snapshot.originals or snapshot.tensors
        multiply_(grads, factor, snapshot.kind)


def _has_any(step: OptimizerStep, ids: frozenset[int]) -> bool:
    return not ids.isdisjoint(map(id, step.params()))


def params_of(steps: list[OptimizerStep]) -> list[Tensor]:
    """Return the parameters whose gradients the steps have collected."""
    return [
        param
        for step in steps
        for param in (
            # A step that was carried over has released its snapshot.
            [p for p in step.params() if p.grad is not None]
            if step.snapshot is None
            else step.snapshot.params
        )
    ]
