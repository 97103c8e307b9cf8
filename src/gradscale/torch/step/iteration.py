"""The steps of all optimizers between two updates."""

import weakref
from collections import defaultdict
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.torch.device_state.update import StepSummary
from gradscale.torch.devices import to_device
from gradscale.torch.grads.clip import Clip
from gradscale.torch.grads.stats import largest
from gradscale.torch.step.dispatch import mode_of
from gradscale.torch.step.entries import OptimizerEntries
from gradscale.torch.step.optimizer_step import OptimizerStep


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
        step: Its own decision is taken as it is.
        home: The device of the result.
    """
    given = list(flags.values())
    own = None if step.decision is None else step.decision.skip
    if len(given) == 1 and given[0] is own and own.device == home:
        return own
    # Flags written by other code may be sums: only 0 and 1 are defined.
    return largest([to_device(flag.reshape(()), home) for flag in given]).clamp(0, 1)


class Carried(NamedTuple):
    """A step that an `update()` found unfinished.

    Attributes:
        step: All that is known of it.
        state: Its stage and flags.
        gradients: For each gradient, a weak reference and its version: a gradient
            that was replaced or written to is of another step.
    """

    step: OptimizerStep
    state: dict[str, Any]
    gradients: list[tuple[weakref.ref[Tensor], int]]

    def still_holds(self) -> bool:
        """Return whether the gradients are the very same as at the update."""
        grads = [param.grad for param in self.step.params()]
        present = [grad for grad in grads if grad is not None]
        return len(present) == len(self.gradients) and all(
            grad is ref() and grad._version == version
            for grad, (ref, version) in zip(present, self.gradients, strict=True)
        )


class Iteration:
    """The optimizers that were touched since the last update.

    Attributes:
        states: Torch's own table: stage and flags by the optimizer's id.
        steps: Their steps, by the same key.
        params_clips: Clips of bare parameters, each with the ids of these.
        scaled: A loss was scaled since the last update.
        noted: The last one was noted in the device state; in a transform of
            `torch.func` it cannot be.
        losses: How many scalar losses were.
        carried: Steps that an update found unfinished, by the same key.
        settled: The steps behind the last outcome; empty before the first.
        closed: The keys of the steps that the last update has ended; none if it only
            set the scale.
    """

    def __init__(self) -> None:
        self.settled: dict[int, OptimizerStep] = {}
        self.closed: set[int] = set()
        self.carried: dict[int, Carried] = {}
        self.renew()

    def renew(self) -> None:
        """Forget everything since the last update."""
        self.states: dict[int, dict[str, Any]] = defaultdict(fresh_state)
        self.steps: dict[int, OptimizerStep] = {}
        self.params_clips: list[tuple[frozenset[int], Clip]] = []
        self.scaled = False
        self.noted = True
        self.losses = 0

    def replace_states(self, states: dict[int, dict[str, Any]]) -> None:
        """Take a new table of states, with which other code ends the iteration."""
        self.closed = set(self.steps)
        self.renew()
        self.states = states

    def abandon(self) -> None:
        """Forget also the steps that an update found unfinished."""
        self.carried = {}
        self.renew()

    def open(self, optimizer: Any, model: Any) -> OptimizerStep:
        """Return the optimizer's step; an unfinished one continues."""
        key = id(optimizer)
        if key not in self.steps:
            carried = self.carried.pop(key, None)
            if carried is not None and carried.still_holds():
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
        """Continue every unfinished step that has such parameters."""
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
        """Forget unscaled steps whose gradients were all set to None since."""
        for step in self.unscaled():
            had_some = step.snapshot is not None and step.snapshot.present
            if had_some and all(param.grad is None for param in step.params()):
                self.forget_one(id(step.optimizer))

    def stage(self, step: OptimizerStep) -> OptState:
        """Return the stage of the step, as torch names it."""
        return self.states[id(step.optimizer)]["stage"]

    def summaries(
        self, entries: OptimizerEntries, used_scale: Tensor, home: torch.device
    ) -> tuple[list[StepSummary], list[int]]:
        """Return the step of each optimizer, and the keys of those without one.

        Args:
            entries: Their accounts are written by the update.
            used_scale: f32[], the scale that multiplied the last loss.
            home: The device of the update.
        """
        found, idle = [], []
        for key, entry in self.states.items():
            flags, stage = entry["found_inf_per_device"], entry["stage"]
            if flags:
                step = self.steps.get(key) or OptimizerStep()
                made, clip = step.decision, step.clip
                if clip is None and self.params_clips:
                    clip = self.params_clip_of(step)
                skip = skip_of(flags, step, home)
                account = None if step.entry is None else step.entry.account
                found.append(
                    StepSummary(
                        account=account or entries.account(key),
                        scale=used_scale if step.scale is None else step.scale,
                        stepped=stage is OptState.STEPPED,
                        skip=skip,
                        found=skip if made is None else made.found,
                        norm_found=None if made is None else made.norm_found,
                        norm=None if clip is None else clip.norm,
                        amax=None if made is None else made.amax,
                    )
                )
            elif stage is not OptState.READY and key in self.steps:
                idle.append(key)
        return found, idle

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
            step.also_skip(clip.found)
            skip = torch.maximum(skip, clip.found)
        kinds = () if step.stats is None else step.stats.kinds
        devices = {kind.device for kind in kinds}
        if devices <= {skip.device}:
            return {skip.device: skip}
        return {device: skip.to(device, non_blocking=True) for device in devices}

    def ended_in_last(self, params: list[Tensor]) -> bool:
        """Return whether the last update ended steps of all these parameters."""
        closed = {
            id(param)
            for key, step in self.settled.items()
            if key in self.closed and step.owner() is not None
            for param in step.params()
        }
        return closed.issuperset(id(param) for param in params)

    def params_clip_of(self, step: OptimizerStep) -> Clip | None:
        """Return the clips of bare parameters that count for this step, as one."""
        if not self.params_clips:
            return None
        clips = [clip for ids, clip in self.params_clips if self.affects(ids, step)]
        if not clips:
            return None
        return reduce(lambda earlier, clip: clip.after(earlier), clips)

    def affects(self, ids: frozenset[int], step: OptimizerStep) -> bool:
        """Return whether parameters are of this step, or of no optimizer known here.

        Those may have been copied to the parameters of any.
        """
        if step.owner() is None or _has_any(step, ids):
            return True
        known = chain(self.steps.values(), self.settled.values())
        return not any(
            _has_any(other, ids) for other in known if other.owner() is not None
        )

    def drop(self, key: int, param_groups: list[dict[str, Any]]) -> None:
        """Let go of the parameters of an optimizer that was deleted."""
        if key in self.settled:
            self.settled[key].name_params(param_groups)
        self.carried.pop(key, None)

    def unscaled(self) -> list[OptimizerStep]:
        """Return the steps whose gradients are unscaled and not yet used."""
        return [s for s in self.steps.values() if self.stage(s) is OptState.UNSCALED]

    def closed_params(self) -> list[Tensor]:
        """Return the parameters to whose gradients no backward should add."""
        clipped = [
            step
            for step in self.steps.values()
            if self.stage(step) is OptState.READY and step.clip is not None
        ]
        carried = [
            one.step
            for one in self.carried.values()
            if one.state["stage"] is OptState.UNSCALED and one.still_holds()
        ]
        return params_of(self.unscaled() + clipped + carried)

    def also_skip(self, step: OptimizerStep, found: Tensor) -> None:
        """Skip a step that was decided before, where `found` is 1."""
        step.also_skip(found)
        flags = self.states[id(step.optimizer)]["found_inf_per_device"]
        for device, flag in flags.items():
            flags[device] = torch.maximum(flag, to_device(found, device))

    def end(self, used_scale: Tensor, entries: OptimizerEntries) -> None:
        """End the steps that were unscaled or taken; carry over the others.

        Args:
            used_scale: f32[], the scale that multiplied the last loss.
            entries: Optimizers that were not called since the last update may have
                gradients too, which keep their scale.
        """
        if self.scaled and not torch.compiler.is_compiling():
            for optimizer in entries.others({*self.steps, *self.carried}):
                before = self.settled.get(id(optimizer))
                step = self.open(optimizer, None)
                grads = [param.grad for param in step.params()]
                if before is not None and before.still_has(grads):
                    # Of a step that was taken.
                    self.forget_one(id(optimizer))
        touched = [
            key
            for key, state in self.states.items()
            if state["stage"] is not OptState.READY or state["found_inf_per_device"]
        ]
        if not torch.compiler.is_compiling():
            self._carry(used_scale)
        self.closed = set(touched)
        if touched:
            self.settled = {
                key: self.steps.get(key) or OptimizerStep() for key in touched
            }
            for step in self.settled.values():
                step.release()
        self.renew()

    def _carry(self, used_scale: Tensor) -> None:
        kept = {key: old for key, old in self.carried.items() if old.still_holds()}
        for key, step in self.steps.items():
            if self.states[key]["stage"] is not OptState.STEPPED:
                carried = _carried(step, self.states[key], used_scale)
                if carried.gradients:
                    step.release()
                    kept[key] = carried
        self.carried = kept


def _has_any(step: OptimizerStep, ids: frozenset[int]) -> bool:
    return not ids.isdisjoint(map(id, step.params()))


def params_of(steps: list[OptimizerStep]) -> list[Tensor]:
    """Return the parameters whose gradients the steps have collected."""
    return [
        param
        for step in steps
        for param in (
            # A step that was carried over has let go of its snapshot.
            [p for p in step.params() if p.grad is not None]
            if step.snapshot is None
            else step.snapshot.params
        )
    ]


def _carried(step: OptimizerStep, state: dict[str, Any], used_scale: Tensor) -> Carried:
    if step.scale is None:
        step.scale = used_scale.clone()
    grads = [param.grad for param in step.params()]
    marks = [(weakref.ref(g), g._version) for g in grads if g is not None]
    return Carried(step, state, marks)
