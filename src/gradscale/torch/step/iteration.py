"""All that is open between two updates."""

import weakref
from collections import defaultdict
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.torch.devices import moved
from gradscale.torch.grads.clip import Clip
from gradscale.torch.grads.stats import largest
from gradscale.torch.step.optimizer_step import OpenStep


def fresh_state() -> dict[str, Any]:
    """Return the state of an optimizer that nothing was done for."""
    # Equal to torch's own, which torch.compile would refuse to call.
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def skip_of(
    state: dict[str, Any], home: torch.device, judged: Tensor | None = None
) -> Tensor:
    """Return f32[], exactly 0 or 1, from the flags of all devices.

    Args:
        state: The optimizer's own.
        home: Where the answer goes.
        judged: f32[], a flag that is known to be exactly 0 or 1.
    """
    given = list(state["found_inf_per_device"].values())
    if len(given) == 1 and given[0] is judged and judged.device == home:
        return judged
    flags = [moved(flag.reshape(()), home) for flag in given]
    # Flags may come from elsewhere and be sums: only 0 and 1 are understood.
    return largest(flags).clamp(0.0, 1.0)


class Carried(NamedTuple):
    """A step that an `update()` found unfinished.

    Attributes:
        step: What was known of it.
        state: Its stage and flags.
        gradients: For each gradient, a weak reference and its version: a gradient
            that was replaced or written to is of another step.
    """

    step: OpenStep
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
        steps: What else is known, by the same key.
        params_clips: Clips of bare parameters, each with the ids of these.
        scaled: A loss was scaled since the last update.
        losses: How many losses of one element these were.
        settled: The steps behind the last outcome; empty before the first.
        closed: The keys of the steps that the last update has closed, none if it only
            set the scale.
    """

    def __init__(self) -> None:
        self.settled: dict[int, OpenStep] = {}
        self.closed: set[int] = set()
        self._carried: dict[int, Carried] = {}
        self.renew()

    def renew(self) -> None:
        """Forget everything that is open."""
        self.states: dict[int, dict[str, Any]] = defaultdict(fresh_state)
        self.steps: dict[int, OpenStep] = {}
        self.params_clips: list[tuple[frozenset[int], Clip]] = []
        self.scaled = False
        self.losses = 0

    def abandon(self) -> None:
        """Forget also what an update has cut short."""
        self._carried = {}
        self.renew()

    def open(self, optimizer: Any, model: Any) -> OpenStep:
        """Return the optimizer's step; one that an update cut short is taken up."""
        key = id(optimizer)
        if key not in self.steps:
            carried = self._carried.pop(key, None)
            if carried is not None and carried.still_holds():
                self.steps[key], self.states[key] = carried.step, carried.state
                carried.step.unscaled_before = (
                    self.stage(carried.step) is OptState.UNSCALED
                )
            else:
                last = self.settled.get(key)
                read = None if last is None else last.reading
                before = None if read is None else read.params
                self.steps[key] = OpenStep(optimizer, (model, optimizer), before)
        return self.steps[key]

    def take_up(self, params: list[Tensor], model: Any) -> None:
        """Take up every step that an update cut short and that has such parameters."""
        wanted = {id(param) for param in params}
        for carried in list(self._carried.values()):
            if not wanted.isdisjoint(id(param) for param in carried.step.params()):
                self.open(carried.step.optimizer, model)

    def forget(self, optimizer: Any) -> None:
        """Forget one optimizer; with the last one, the iteration."""
        self.states.pop(id(optimizer), None)
        self.steps.pop(id(optimizer), None)
        self._carried.pop(id(optimizer), None)
        if not self.steps:
            self.renew()

    def stage(self, step: OpenStep) -> OptState:
        """Return how far the step has come."""
        return self.states[id(step.optimizer)]["stage"]

    def seen_in_last(self, params: list[Tensor]) -> bool:
        """Return whether the last update closed steps of all these parameters."""
        closed = {
            id(param)
            for key, step in self.settled.items()
            if key in self.closed and step.optimizer is not None
            for param in step.params()
        }
        return closed.issuperset(id(param) for param in params)

    def params_clip_of(self, step: OpenStep) -> Clip | None:
        """Return the clips of bare parameters that count for this step, as one."""
        clips = [c for ids, c in self.params_clips if self.concerns(ids, step)]
        return reduce(lambda earlier, clip: clip.after(earlier), clips, None)

    def concerns(self, ids: frozenset[int], step: OpenStep) -> bool:
        """Return whether parameters are of this step, or of no optimizer known here.

        Those may have been copied to the parameters of any.
        """
        if step.optimizer is None or _has_any(step, ids):
            return True
        known = chain(self.steps.values(), self.settled.values())
        return not any(
            _has_any(other, ids) for other in known if other.optimizer is not None
        )

    def unscaled(self) -> list[OpenStep]:
        """Return the steps whose gradients are unscaled and not yet used."""
        return [s for s in self.steps.values() if self.stage(s) is OptState.UNSCALED]

    def closed_params(self) -> list[Tensor]:
        """Return the parameters to whose gradients no backward should add."""
        clipped = [
            step
            for step in self.steps.values()
            if self.stage(step) is OptState.READY and step.clip is not None
        ]
        return params_of(self.unscaled() + clipped)

    def also_skip(self, step: OpenStep, found: Tensor) -> None:
        """Skip a step that was looked at before, if `found` says so."""
        earlier = step.norm_found
        step.norm_found = found if earlier is None else torch.maximum(found, earlier)
        flags = self.states[id(step.optimizer)]["found_inf_per_device"]
        for device, flag in flags.items():
            flags[device] = torch.maximum(flag, moved(found, device))

    def end(self, used_scale: Tensor) -> None:
        """Close what has stepped or was unscaled; carry over what was not used."""
        touched = [
            key
            for key, state in self.states.items()
            if state["stage"] is not OptState.READY or state["found_inf_per_device"]
        ]
        if not torch.compiler.is_compiling():
            self._carry(used_scale)
        self.closed = set(touched)
        if touched:
            self.settled = {key: self.steps.get(key) or OpenStep() for key in touched}
            for key in touched:
                # Only the reading is looked at later: let go of the gradients.
                self.settled[key].gradients = None
        self.renew()

    def _carry(self, used_scale: Tensor) -> None:
        kept = {key: old for key, old in self._carried.items() if old.still_holds()}
        for key, step in self.steps.items():
            if self.stage(step) is not OptState.STEPPED:
                carried = _carried(step, self.states[key], used_scale)
                if carried.gradients:
                    kept[key] = carried
        self._carried = kept


def _has_any(step: OpenStep, ids: frozenset[int]) -> bool:
    return not ids.isdisjoint(map(id, step.params()))


def params_of(steps: list[OpenStep]) -> list[Tensor]:
    """Return the parameters whose gradients the steps have gathered."""
    return [
        param
        for step in steps
        for param in (
            # A step that was carried over has let go of what it had gathered.
            [p for p in step.params() if p.grad is not None]
            if step.gradients is None
            else step.gradients.params
        )
    ]


def _carried(step: OpenStep, state: dict[str, Any], used_scale: Tensor) -> Carried:
    if step.scale is None:
        step.scale = used_scale.clone()
    grads = [param.grad for param in step.params()]
    marks = [(weakref.ref(g), g._version) for g in grads if g is not None]
    return Carried(step, state, marks)
