"""The scaler users call: torch.amp.GradScaler's interface around the core's rule.

Longer than other files because torch's interface is: torch.compile refuses methods
that are inherited from torch.amp, so all of them stand here.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path as FilePath
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.core.checkpoint import AnyPolicy, torch_settings, unpack
from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import DynamicScale, NoScale
from gradscale.core.state import FixedState, ScaleState
from gradscale.errors import ConfigError, GradientError, HopelessRun, ScaleCollapsed
from gradscale.recording.recorder import Recorder
from gradscale.torch import checkpoint, messages
from gradscale.torch.device_state.flag import Flag
from gradscale.torch.device_state.host_copy import LateRow, Mailbox
from gradscale.torch.device_state.layout import Account, Ledger, new_account, new_ledger
from gradscale.torch.device_state.loss_stats import is_a_loss, note_
from gradscale.torch.device_state.update import Part, force_scale, settle, settle_idle
from gradscale.torch.devices import (
    device_type,
    host_may_act,
    is_there,
    warn_disabled,
)
from gradscale.torch.grads.clip import (
    Clip,
    check_max_norm,
    clip_of,
    clip_params_,
    split_target,
)
from gradscale.torch.grads.collect import gather
from gradscale.torch.grads.stats import combine_norms
from gradscale.torch.grads.unscale import inverse, multiply_
from gradscale.torch.kernels import Kernels
from gradscale.torch.kernels.readers import Reader
from gradscale.torch.locate.diagnose import diagnose
from gradscale.torch.locate.result import Location
from gradscale.torch.monitor.model_lookup import find_model
from gradscale.torch.monitor.monitor import Monitor
from gradscale.torch.monitor.process import process_here
from gradscale.torch.names import names_of
from gradscale.torch.ranks.consensus import Ranks, Voice
from gradscale.torch.ranks.sharding import lone, ranks_are_there, replicas_of
from gradscale.torch.scaling import map_outputs, times
from gradscale.torch.step.amp_protocol import handed_over, prepare_momentum
from gradscale.torch.step.backward_check import watch_backward
from gradscale.torch.step.counting import StepCount, postfix
from gradscale.torch.step.dispatch import Path, Way, path_of, unscales_itself, way_of
from gradscale.torch.step.iteration import Iteration, params_of, skip_of
from gradscale.torch.step.optimizer_step import OpenStep
from gradscale.torch.step.outcome import DisabledBook, count_of, outcome_of
from gradscale.torch.step.two_owners import unscale_once_
from gradscale.torch.underflow.meter import Meter


class GradScaler(torch.amp.GradScaler):
    """Scale the loss, unscale the gradients, step or skip, move the scale.

    A drop-in for `torch.amp.GradScaler`: same arguments, methods, errors and
    checkpoints. It also says what became of each step (`last`), clips
    (`clip_grad_norm_`), and lets no value reach a weight that is not finite when the
    gradients are read, or would not be once unscaled.

    >>> import torch
    >>> from gradscale.torch import GradScaler
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> scaler = GradScaler("cpu", model=model)
    >>> loss = model(torch.ones(8, 4)).square().mean()
    >>> scaler.scale(loss).backward()
    >>> norm = scaler.clip_grad_norm_(optimizer, max_norm=1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.last.applied, scaler.last.scale, scaler.postfix()
    (True, 65536.0, 'S=2^16 skipped 0/1')

    Args:
        device: Type of the device, such as "cuda" or "cpu".
        init_scale, growth_factor, backoff_factor, growth_interval: As in torch.
        enabled: False turns every method into a no-op around `optimizer.step()`.
        policy: Settings and rule in one value, instead of the four numbers above.
        guard: "report" moves the scale as torch does and raises where torch would,
            and at the floor. "raise" also holds the scale while the loss is not
            finite on any rank, and raises on misuse. Under DDP, pass the wrapped model
            as `model`, or `process_group`: without it the losses of other ranks are
            not known, and the scale is not held.
        model: Names the culprits by the model's parameter names. Not pickled.
        process_group: The ranks that decide together, each of which holds gradients
            of its own. None to find them by the parameters: those of DTensors (FSDP2,
            tensor parallelism) and of FSDP1; and none where gradients arrive reduced,
            as under DDP.
        kernels: "auto" for Triton where it runs, "plain" for plain torch operations
            only, "triton" to insist.
        allow_fp16: Accept float16 gradients in `unscale_` and with every optimizer.
        recheck: Read the gradients again in `step` after an explicit `unscale_`, so
            that what was written into them in between is checked too.
        record: The run file to write, by custom ending in .gs; None for none. Rank 0
            writes it. Not pickled.
        sinks: Each gets every step's record and judgement: see `gradscale.sinks`. Not
            pickled.
    """

    _frames_to_caller: ClassVar[int] = 3
    _always_together: ClassVar[bool] = False

    # The base class sets its attributes in its own __init__, without bounds and
    # without checks: it is not called.
    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: AnyPolicy | None = None,
        guard: Literal["report", "raise"] = "report",
        model: torch.nn.Module | None = None,
        process_group: Any = None,
        kernels: Kernels = "auto",
        allow_fp16: bool = False,
        recheck: bool = False,
        record: str | os.PathLike[str] | Recorder | None = None,
        sinks: Iterable[Any] = (),
    ) -> None:
        self._device = device_type(device)
        messages.check_choice("guard", guard, ("report", "raise"))
        messages.check_choice("kernels", kernels, ("auto", "plain", "triton"))
        self._enabled = bool(enabled)
        if self._enabled and not is_there(self._device):
            warn_disabled(self._device, self._frames_to_caller)
            self._enabled = False
        moves = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._policy = checkpoint.chosen(policy, moves) if self._enabled else NoScale()
        self._guard = guard
        self._model = model
        self._process_group = process_group
        self._kernels = kernels
        self._allow_fp16 = allow_fp16
        self._recheck = recheck
        self._record, self._sinks = record, tuple(sinks)
        self._init_scale: float = self._policy.init_state().scale
        self._init_growth_tracker = 0
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._resumed = checkpoint.Resumed()
        self._loaded = False
        self._begin()

    def _begin(self) -> None:
        """Set what lives only as long as the process."""
        self._ledger: Ledger | None = None
        self._accounts: dict[int, Account] = {}
        self._readers: dict[int, Reader] = {}
        self._iteration = Iteration()
        self._mailbox = Mailbox()
        self._watchman = messages.Watchman()
        self._monitor = Monitor(
            guard=self._guard,
            model=self._model,
            recorder=self._recorder(),
            sinks=self._sinks,
            kernels=self._kernels,
        )
        self._ranks = Ranks(
            self._process_group,
            always=self._always_together,
            replicas=replicas_of(self._model),
            share_losses=self._guard == "raise",
        )
        self._disabled_book = DisabledBook()

    def _recorder(self) -> Recorder | None:
        """Return the recorder that a user asked for by a path, or gave."""
        if self._record is None:
            return None
        model, given = self._model, self._record
        recorder = given if isinstance(given, Recorder) else Recorder(given)

        def names() -> list[str]:
            return (
                [] if model is None else [name for name, _ in model.named_parameters()]
            )

        recorder.bind(policy=self._policy, names=names, process=process_here)
        return recorder

    def scale(self, outputs: Any) -> Any:
        """Return the outputs times the scale. No host sync.

        Args:
            outputs: A tensor, or a nest of lists, tuples and other iterables of them.
                A half-precision loss of one element is scaled in f32.
        """
        if not self._enabled:
            return outputs
        return map_outputs(outputs, self._scale_one)

    def _scale_one(self, output: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        scale, ledger = self._books("scale")
        first = self._iteration.losses == 0
        note_(output, scale, ledger, first=first, kernels=self._kernels)
        self._iteration.scaled = True
        self._iteration.losses += is_a_loss(output)
        self._ranks.losses_are_known = False
        scaled = times(output, scale)
        if host_may_act():
            self._monitor.module_hooks.watch_loss(scaled, output)
            closed_params = self._iteration.closed_params
            watch_backward(scaled, closed_params, self._report_late_backward)
        return scaled

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full(
            (), self._init_growth_tracker, dtype=torch.int32, device=dev
        )
        self._ledger = new_ledger(dev, self._init_scale)
        self._resumed.enter(self._ledger)
        self._monitor.meter.start(self._ledger.total.start)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is None or tracker is None:
            raise messages.not_scaled(
                funcname, "_scale" if scale is None else "_growth_tracker"
            )
        return scale, tracker

    def _books(self, funcname: str) -> tuple[Tensor, Ledger]:
        """Return the scale and the ledger, which both come with the first loss."""
        scale, _ = self._check_scale_growth_tracker(funcname)
        assert self._ledger is not None
        return scale, self._ledger

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, in place. No host sync.

        A clip that was asked for before is applied in the same pass.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        step = self._open_step(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if step.unscaled_before and state["stage"] is OptState.UNSCALED:
            return
        if state["stage"] is not OptState.READY:
            raise messages.unscaled_before(state["stage"] is OptState.STEPPED)
        self._read_and_judge(step, self._allow_fp16)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, self._multiplier(step), None, self._allow_fp16
        )
        state["stage"] = OptState.UNSCALED
        step.decision = None
        if step.clip is not None:
            step.clip = step.clip.applied()

    def _unscale_grads_(
        self,
        optimizer: Any,
        inv_scale: Tensor,
        found_inf: Tensor | None,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Read and multiply the gradients; return whether to skip, by device."""
        step = self._open_step(optimizer)
        found = self._look(step, inv_scale, found_inf, allow_fp16)
        if found:
            self._send_ahead(step, found)
            self._sample(step)
            others = [s for s in self._iteration.steps.values() if s is not step]
            unscale_once_(step, others, inv_scale)
            step.close()
        return found

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """Read the gradients and write nothing; the optimizer itself unscales."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        step = self._open_step(optimizer)
        self._read_and_judge(step, True)
        step.divisor = self._grad_scale(step)
        if step.decision is not None:
            found = self._look(step, step.decision.multiplier, None, True)
        else:
            found = self._look(step, inverse(step.divisor), None, True, step.divisor)
        self._sample(step)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _look(
        self,
        step: OpenStep,
        multiplier: Tensor,
        found_inf: Tensor | None,
        allow_fp16: bool,
        grad_scale: Tensor | None = None,
    ) -> dict[torch.device, Tensor]:
        if not step.just_read:
            step.read(allow_fp16=allow_fp16, home=multiplier.device)
        step.just_read = False
        return step.look(
            multiplier,
            found_inf,
            grad_scale=grad_scale,
            params_clip=self._iteration.params_clip_of(step),
        )

    def _sample(self, step: OpenStep) -> None:
        """Let the underflow meter count, if it wants to, in what backward left."""
        if (
            not (host_may_act() and self._monitor.meter.wanted)
            or step.gradients is None
        ):
            return
        others = self._iteration.steps.values()
        clipped = self._iteration.params_clip_of(step)
        if step.versions is clipped is None and not step.shares_with(others):
            self._monitor.meter.sample(
                step.gradients, self._scale_behind(step), step.names, step.reading
            )

    def _send_ahead(self, step: OpenStep, found: dict[torch.device, Tensor]) -> None:
        """Start the flag on its way before anything else is queued."""
        told = unscales_itself(step.optimizer)
        if not told and len(found) == 1 and host_may_act():
            step.flag = Flag.start(next(iter(found.values())))

    def _read_and_judge(self, step: OpenStep, allow_fp16: bool) -> None:
        """Read the gradients and let a kernel judge them, if it can."""
        scale, _ = self._books("unscale_")
        step.read(allow_fp16=allow_fp16, home=scale.device)
        if step.decision is None:
            step.decide(self._scale_behind(step), None)
        step.just_read = True

    def _multiplier(self, step: OpenStep) -> Tensor:
        """Return what turns this step's gradients into unscaled and clipped ones."""
        if step.decision is not None:
            return step.decision.multiplier
        multiplier = inverse(self._scale_behind(step))
        return multiplier if step.clip is None else multiplier * step.clip.coef

    def _grad_scale(self, step: OpenStep) -> Tensor:
        """Return what an optimizer that unscales itself is to divide by."""
        if step.decision is not None:
            return step.decision.grad_scale
        scale = self._scale_behind(step)
        return scale if step.clip is None else scale / step.clip.coef

    def _scale_behind(self, step: OpenStep) -> Tensor:
        """Return the scale that multiplied the loss of this step's gradients.

        After an `update()` without a new `scale()`, that is the scale before the
        update; but an optimizer that the update has closed must have its gradients
        from elsewhere: from a replayed graph, or from a loss multiplied by hand.
        """
        scale, ledger = self._books("unscale_")
        if step.scale is not None:
            return step.scale
        iteration = self._iteration
        if iteration.scaled:
            return ledger.used_scale
        from_elsewhere = id(step.optimizer) in iteration.closed
        behind = scale if from_elsewhere else ledger.used_scale
        if step.gradients is not None and not step.gradients.present:
            # Those that it will step on are still to come.
            return behind
        # A copy: another optimizer's loss may be scaled before this step is taken.
        step.scale = behind.clone()
        return step.scale

    def clip_grad_norm_(
        self, target: Any, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the unscaled gradients by their joint norm. No host sync.

        Right before and after `unscale_`. Before it, the clip of an optimizer is
        folded into its step, and `.grad` is unspecified until then. A norm that is
        not a usable f32 skips the step.

        Args:
            target: An optimizer, several, or parameters.
            max_norm: The largest norm to let through.
            norm_type: The order of the norm; inf for the largest magnitude.

        Returns:
            f32[], the norm of the unscaled gradients before clipping.
        """
        max_norm, norm_type = check_max_norm(max_norm, norm_type)
        optimizers, params = split_target(target)
        if not self._enabled:
            groups = [group for opt in optimizers for group in opt.param_groups]
            params += [param for group in groups for param in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        if params:
            return self._clip_params(params, max_norm, norm_type)
        return self._clip_optimizers(optimizers, max_norm, norm_type)

    def _clip_optimizers(
        self, optimizers: list[Any], max_norm: float, norm_type: float
    ) -> Tensor:
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        alone = len(optimizers) == 1 and not self._iteration.params_clips
        steps, norms = [], []
        for optimizer in optimizers:
            step = self._open_step(optimizer)
            stage = self._iteration.stage(step)
            if stage is OptState.STEPPED:
                raise messages.clipped_late(optimizer)
            ready = stage is OptState.READY
            allow_fp16 = self._allow_fp16 or (ready and unscales_itself(optimizer))
            if step.voice is not None:
                step.voice.clips(max_norm, norm_type)
            known = None if ready else step.unscaled_norm(norm_type)
            if known is not None:
                steps.append((step, torch.ones_like(scale)))
                norms.append(known)
                continue
            step.read(allow_fp16=allow_fp16, home=scale.device, norm_type=norm_type)
            if alone and ready and norm_type == 2.0:
                decision = step.decide(self._scale_behind(step), max_norm)
                if decision is not None:
                    return decision.norm
            if step.reading is not None and step.reading.norm is not None:
                factor = self._multiplier(step) if ready else torch.ones_like(scale)
                steps.append((step, factor))
                norms.append(step.reading.norm * factor)
        if not norms:
            return torch.zeros_like(scale)
        norm = combine_norms(norms, norm_type).float()
        for step, factor in steps:
            self._clip_step(step, clip_of(norm, max_norm, factor))
        return norm

    def _clip_step(self, step: OpenStep, clip: Clip) -> None:
        step.clip, step.decision = clip.after(step.clip), None
        if self._iteration.stage(step) is OptState.READY:
            return
        assert step.gradients is not None
        multiply_(step.gradients.tensors, clip.coef, step.gradients.kind)
        step.clip = step.clip.applied()
        step.close()
        self._iteration.also_skip(step, clip.found)

    def _clip_params(
        self, params: list[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip bare parameters at once: no step is known to fold the clip into."""
        scale, ledger = self._books("clip_grad_norm_")
        voice = self._voice(-1, params) if ranks_are_there() else None
        copies = None if voice is None else voice.copies
        try:
            gradients = gather(
                params, allow_fp16=True, names=(self._model,), copies=copies
            )
        except GradientError:
            if voice is not None:
                voice.refuse()
            raise
        if not gradients.tensors and voice is None:
            return torch.zeros_like(scale)
        self._iteration.take_up(params, self._model)
        steps = self._iteration.unscaled()
        unscaled = {id(param) for param in params_of(steps)}
        by_hand = not self._iteration.scaled and self._iteration.seen_in_last(params)
        behind = scale if by_hand else ledger.used_scale
        first = not unscaled and not self._iteration.params_clips
        if first and host_may_act() and self._monitor.meter.wanted:
            # The clip is written at once: later there is nothing left to count in.
            namer: Any = self._model
            if namer is None:
                namer = self._monitor.model_lookup.of_params(params)
            self._monitor.meter.sample(gradients, behind, (namer,))
        inv_scale = inverse(behind)
        clip = clip_params_(gradients, unscaled, inv_scale, max_norm, norm_type, voice)
        clipped = frozenset(map(id, params))
        for step in steps:
            if self._iteration.concerns(clipped, step):
                step.close()
                self._iteration.also_skip(step, clip.found)
        self._iteration.params_clips.append((clipped, clip))
        return clip.norm

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer if its gradients are finite, else leave all untouched.

        No host sync with fused optimizers, one flag read with any other.

        Returns:
            What `optimizer.step` returned, or None if it was not called.
        """
        if not self._enabled:
            self._disabled_book.step(optimizer)
            return optimizer.step(*args, **kwargs)
        if (args and callable(args[0])) or kwargs.get("closure") is not None:
            raise messages.closure_given()
        kwargs.pop("closure", None)
        self._check_scale_growth_tracker("step")
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise messages.stepped_before()
        if self._starts_anew() and host_may_act():
            self._watchman.warn_without_state(optimizer, self._init_scale)
        if way_of(optimizer) is Way.OLDER:
            returned = self._step_older_protocol(optimizer, args, kwargs)
        else:
            returned = self._step_checked(optimizer, args, kwargs)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        return returned

    def _starts_anew(self) -> bool:
        """Return whether the scaler moves, has loaded nothing, and never updated."""
        moves = isinstance(self._policy, DynamicScale)
        return moves and not self._loaded and not self._iteration.settled

    def _step_checked(self, optimizer: Any, args: Any, kwargs: Any) -> float | None:
        scale, ledger = self._books("step")
        step = self._open_step(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        way = way_of(optimizer)
        fused = way is not Way.FLAG
        if state["stage"] is OptState.UNSCALED:
            if self._recheck and state["found_inf_per_device"]:
                self._look_again(step, state)
        elif fused and not step.shares_with(self._iteration.steps.values()):
            self._check_inf_per_device(optimizer)
            if step.gradients is not None and step.gradients.shared:
                # The kernel would divide one memory twice.
                self.unscale_(optimizer)
        else:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            self._watchman.warn_no_gradients(optimizer)
            return None
        if not fused:
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)
        found_inf = skip_of(state, scale.device, step.skip)
        if prepare_momentum(optimizer) and found_inf.item():
            messages.tell_scheduler(optimizer)
            return None
        grad_scale = leftover = None
        if state["stage"] is OptState.READY:
            # Not there if somebody has overridden the check.
            told = step.divisor is not None
            grad_scale = step.divisor if told else self._grad_scale(step)
            left = found_inf if way is Way.FUSED else ledger.one
            leftover = left, self._scale_behind(step)
        seen = step.seen() if way is Way.OWN and leftover is not None else None
        if way is Way.FUSED and step.reader is not None:
            found_inf = step.reader.stand_in.flag(optimizer, found_inf)
        with handed_over(optimizer, grad_scale, found_inf, seen):
            returned = optimizer.step(*args, **kwargs)
        step.close(leftover, written=seen is None)
        return returned

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        scale, _ = self._check_scale_growth_tracker("step")
        step = self._iteration.steps.get(id(optimizer))
        flag = None if step is None else step.flag
        if flag is not None and flag.stands_for(
            optimizer_state["found_inf_per_device"]
        ):
            skip = flag.value()
        else:
            # Nothing was sent ahead, or the decision has changed since.
            skip = bool(skip_of(optimizer_state, scale.device).item())
        if skip:
            messages.tell_scheduler(optimizer)
            return None
        return optimizer.step(*args, **kwargs)

    def _step_older_protocol(
        self, optimizer: Any, args: Any, kwargs: Any
    ) -> float | None:
        # The words of torch: filters out there match them.
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the "
            "passed optimizer. In the near future GradScaler registers `grad_scale: "
            "Tensor` and `found_inf: Tensor` to the passed optimizer and let the "
            "optimizer use them directly.",
            FutureWarning,
            stacklevel=3,
        )
        return optimizer.step(*args, grad_scaler=self, **kwargs)

    def _look_again(self, step: OpenStep, state: dict[str, Any]) -> None:
        scale, _ = self._check_scale_growth_tracker("step")
        skip, found, amax = skip_of(state, scale.device), step.found, step.amax
        again = self._look(step, torch.ones_like(skip), skip, True)
        # `amax` is of the scaled gradients: the first look's.
        step.amax = amax
        if found is not None and step.found is not None:
            step.found = torch.maximum(found, step.found)
        state["found_inf_per_device"] = again

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale and end the step. No host sync.

        Args:
            new_scale: Taken instead of the rule's. A number outside the policy's
                bounds is refused. A tensor on a device is not read on the host:
                outside the bounds, it is ignored and reported two steps later.
        """
        if not self._enabled:
            self._disabled_book.update()
            return
        scale, ledger = self._books("update")
        forced = messages.checked_scale(new_scale, self._policy, self._device, scale)
        parts, idle = self._parts()
        may_act = host_may_act()
        if parts:
            settle(
                self._policy,
                self._state(),
                ledger,
                parts,
                hold_on_bad_loss=self._guard == "raise" and self._losses_are_known(),
                forced_scale=forced,
                kernels=self._kernels,
                mailbox=self._mailbox if may_act else None,
            )
        elif forced is not None:
            force_scale(self._policy, self._state(), ledger, forced)
        elif not idle:
            raise messages.nothing_to_update()
        if idle:
            accounts = [self._account(key) for key in idle]
            settle_idle(ledger, accounts, whole=not parts)
        has_loss = self._iteration.losses > 0
        self._iteration.end(ledger.used_scale)
        settled, monitor = self._iteration.settled, self._monitor
        heard = may_act and bool(parts or idle)
        if heard and not monitor.pass_by(settled, self._mailbox, has_loss):
            self._hear(ledger, has_loss)

    def _hear(self, ledger: Ledger, has_loss: bool) -> None:
        """Take note of the update, and act on the facts that are due."""
        self._monitor.look(ledger, self._iteration.settled)
        late = self._mailbox.exchange(ledger, has_loss=has_loss)
        if not self._monitor.put_off(late):
            self._act_on_late_facts(late)

    def _losses_are_known(self) -> bool:
        """Return whether this rank knows the losses of all that share its scale."""
        return lone() or self._ranks.losses_are_known

    def join_hook(self, **kwargs: Any) -> Any:
        """Return what gives a rank that ran out of data the scale of the others.

        For `torch.distributed.algorithms.join.Join([model, scaler])`.
        """
        from gradscale.torch.ranks.join import ScalerJoinHook

        return ScalerJoinHook(self, self.join_process_group)

    @property
    def join_device(self) -> torch.device:
        """Where the scaler lives, as `Join` asks."""
        return torch.device(self._device)

    @property
    def join_process_group(self) -> Any:
        """The ranks that join, as `Join` asks."""
        given = self._process_group
        return torch.distributed.group.WORLD if given is None else given

    def _act_on_late_facts(self, late: list[LateRow] | None) -> None:
        _, ledger = self._books("update")
        try:
            self._monitor.begin(self, self._mailbox, ledger)
            self._monitor.see(late, self.state_dict)
            for one in late or ():
                self._watchman.act(one.row, self._policy, lambda: self.last)
        except (ScaleCollapsed, HopelessRun) as error:
            if isinstance(error, ScaleCollapsed):
                self._monitor.hurry(self.state_dict)
            # Who catches it goes on: what is on its way must not raise again.
            self._mailbox.clear()
            self._monitor.clear()
            raise

    def _parts(self) -> tuple[list[Part], list[int]]:
        """Return what each optimizer contributes, and the keys of the idle ones."""
        scale, ledger = self._books("update")
        steps = self._iteration.steps
        parts, idle = [], []
        for key, state in self._per_optimizer_states.items():
            if state["found_inf_per_device"]:
                step = steps.get(key) or OpenStep()
                clip = step.clip
                if clip is None:
                    clip = self._iteration.params_clip_of(step)
                skip = skip_of(state, scale.device, step.skip)
                part = Part(
                    account=self._account(key),
                    scale=ledger.used_scale if step.scale is None else step.scale,
                    stepped=state["stage"] is OptState.STEPPED,
                    skip=skip,
                    found=skip if step.found is None else step.found,
                    norm_found=step.norm_found,
                    norm=None if clip is None else clip.norm,
                    amax=step.amax,
                )
                parts.append(part)
            elif state["stage"] is not OptState.READY and key in steps:
                idle.append(key)
        return parts, idle

    def reset(self, optimizer: Any = None) -> None:
        """Forget an iteration that is abandoned: no step, no move of the scale.

        The gradients are left as they are; zero them before the next backward.

        Args:
            optimizer: Forget only what concerns this one.
        """
        if not self._enabled:
            return
        if optimizer is None:
            self._iteration.abandon()
        else:
            self._iteration.forget(optimizer)
        if not self._iteration.steps and self._ledger is not None:
            self._ledger.fields.loss_trace.zero_()
        self._monitor.meter.forget()

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last `update()`; None before the first.

        Making it costs no sync; reading a field may. `last[optimizer]` is the outcome
        of one optimizer.
        """
        if not self._enabled:
            return self._disabled_book.outcome()
        settled = self._iteration.settled
        if self._ledger is None or not settled:
            return None
        return outcome_of(self._ledger.total, self._accounts, settled)

    @property
    def applied_steps(self) -> StepCount:
        """How many steps were taken; `applied_steps[optimizer]` for one. Syncs."""
        return self._count(0) if self._enabled else self._disabled_book.applied()

    @property
    def skipped_steps(self) -> StepCount:
        """How many steps were skipped; `skipped_steps[optimizer]` for one. Syncs."""
        return self._count(1) if self._enabled else StepCount(0, {})

    def _count(self, place: int) -> StepCount:
        if self._ledger is None:
            return StepCount(self._resumed.total()[place], {})
        return count_of(self._ledger.total, self._accounts, place)

    def postfix(self) -> str:
        """Return the scale and the skips for a progress bar. Syncs."""
        skipped = self.skipped_steps
        return postfix(self.get_scale(), skipped, skipped + self.applied_steps)

    def diagnose(self, closure: Callable[[], Any]) -> Location:
        """Replay a batch that failed, and name where a value stopped being finite.

        At the scale of the last step. Nothing of the model changes. Syncs.

        Args:
            closure: Runs the forward pass of the batch, under autocast if training
                does, and returns the loss before scaling.
        """
        _, ledger = self._books("diagnose")
        model = self._model
        if model is None:
            model = find_model(params_of(list(self._iteration.settled.values())))
        if model is None:
            raise messages.no_model()
        return diagnose(model, closure, ledger.used_scale)

    def write_bundle(
        self, folder: str | os.PathLike[str] = ".", *, batch: Any = None
    ) -> FilePath:
        """Write the evidence of the last steps into a folder of its own. Syncs.

        Facts of the last 50 steps, the last finding, the scaler's state and versions;
        what is in it, its manifest says. `guard="raise"` writes one by itself.

        Args:
            folder: Where the new one goes.
            batch: Kept with it, as `torch.save` writes it: then your data is in it.

        Returns:
            The new folder.
        """
        state, here = self.state_dict(), FilePath(folder)
        return self._monitor.write_bundle(here, state, batch)

    def close(self) -> None:
        """Judge what is on its way, and close the run file, if there is one. Syncs.

        Called by itself at the end of the process.
        """
        self._monitor.close()

    @property
    def meter(self) -> Meter:
        """The underflow meter. It samples where there is a run file or a sink.

        `meter.watch_activations(model)` also counts in the gradients of module
        outputs.
        """
        return self._monitor.meter

    def path(self, optimizer: Any) -> Path:
        """Return how the optimizer is stepped: its way, and by which kernels.

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> scaler = GradScaler("cpu")
        >>> print(scaler.path(torch.optim.SGD([weight], lr=0.1)).way)
        flag
        >>> print(scaler.path(torch.optim.SGD([weight], lr=0.1, fused=True)).way)
        fused
        """
        return path_of(optimizer, self._kernels, torch.device(self._device))

    @property
    def policy(self) -> AnyPolicy:
        """The policy in use."""
        return self._policy

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def get_scale(self) -> float:
        """Return the scale as a float; 1.0 if disabled. Syncs."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else self._scale.item()

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        if self._growth_tracker is None:
            return self._init_growth_tracker
        return int(self._growth_tracker.item())

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by when it backs off."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it backs off."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Return how many finite steps in a row it takes to grow."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many finite steps in a row it takes to grow."""
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""
        return self._enabled

    def _set_move(self, **setting: Any) -> None:
        if not self._enabled:
            return
        if not isinstance(self._policy, DynamicScale):
            raise ConfigError(
                f"{setting} was set on a scaler with {self._policy!r}, whose scale "
                "never moves. Use DynamicScale, or leave the setting alone.",
                code="GS101",
            )
        self._policy = replace(self._policy, **setting)

    # Attributes of torch's class that public code reads and writes.
    _per_optimizer_states = property(lambda self: self._iteration.states)
    _growth_factor = property(
        lambda self: torch_settings(self._policy)[0],
        lambda self, value: self._set_move(growth_factor=value),
    )
    _backoff_factor = property(
        lambda self: torch_settings(self._policy)[1],
        lambda self, value: self._set_move(backoff_factor=value),
    )
    _growth_interval = property(
        lambda self: torch_settings(self._policy)[2],
        lambda self, value: self._set_move(growth_interval=value),
    )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a plain dict, `{}` if disabled. Syncs.

        Torch's five keys, which `torch.amp.GradScaler` loads, and one more that it
        ignores. Call it after `update()`.
        """
        return checkpoint.pack_scaler(self) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class or of torch's returned.

        `gradscale.import_state` makes such a dict of the states of other scalers. A
        state that cannot be used is refused and nothing is changed. Does nothing if
        disabled.
        """
        if self._enabled:
            checkpoint.load_into(self, unpack(state_dict, self._policy))

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise messages.pickled_inside()
        if self._process_group is not None:
            raise messages.pickled_with_group()
        return checkpoint.frozen(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def _state(self) -> FixedState | ScaleState:
        """Return the tensors that hold the policy's state."""
        scale, ledger = self._books("update")
        if isinstance(self._policy, DynamicScale):
            return ScaleState(scale, self._growth_tracker, ledger.debt)
        return FixedState(scale)

    def _open_step(self, optimizer: Any) -> OpenStep:
        key = id(optimizer)
        known = self._iteration.steps.get(key)
        # Asked for in every call, and furnished once.
        if known is not None and known.furnished:
            return known
        if key not in self._accounts and not torch.compiler.is_compiling():
            if self._ledger is not None:
                self._account(key)
            # The key is an address: it dies with the optimizer. One with __slots__
            # cannot be watched; its account stays.
            with suppress(TypeError):
                weakref.finalize(optimizer, self._accounts.pop, key, None)
                weakref.finalize(optimizer, self._readers.pop, key, None)
                weakref.finalize(optimizer, self._ranks.forget, key)
        step = self._iteration.open(optimizer, self._namer(optimizer))
        if step.reader is None and not torch.compiler.is_compiling():
            if key not in self._readers:
                self._readers[key] = Reader(self._kernels)
            step.reader = self._readers[key]
        if step.voice is None and self._ledger is not None and ranks_are_there():
            step.voice = self._voice(key, step.params())
        step.furnished = step.reader is not None and self._ledger is not None
        return step

    def _namer(self, optimizer: Any) -> Any:
        """Return what names the parameters, if anything does."""
        if self._model is not None or torch.compiler.is_compiling():
            return self._model
        # Looked for only where names are written down.
        if not self._monitor.heard:
            return None
        return self._monitor.model_lookup.of_optimizer(optimizer)

    def _voice(self, key: int, params: list[Tensor]) -> Voice | None:
        """Return how to speak to other ranks; None where this one decides alone."""
        scale, ledger = self._books("step")
        # The place of an optimizer among all is the same on all ranks, unlike its key.
        who = dict(zip(self._accounts, count())).get(key, -1)
        settings = self._policy, self._guard
        return self._ranks.voice(key, params, ledger, scale, settings, who)

    def _account(self, key: int) -> Account:
        if key not in self._accounts:
            _, ledger = self._books("update")
            counts = self._resumed.next_tally(len(self._accounts))
            self._accounts[key] = new_account(ledger.debt.device, *counts)
        return self._accounts[key]

    def _report_late_backward(self, params: list[Tensor]) -> None:
        steps = self._iteration.steps.values()
        sources = [self._model, *(step.optimizer for step in steps)]
        messages.report_late_backward(names_of(params, sources), self._guard == "raise")
