"""The scaler users call: torch.amp.GradScaler's interface around the core's rule.

Longer than other files because the interface is: every method of torch's class is
here, for torch.compile refuses the inherited ones.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.core.checkpoint import AnyPolicy, torch_settings, unpack
from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import DynamicScale, NoScale
from gradscale.core.state import FixedState, ScaleState
from gradscale.core.verdicts import StepRecord
from gradscale.errors import ConfigError, OrderError
from gradscale.torch import guards, saving
from gradscale.torch.agreement import agree
from gradscale.torch.clipping import Clip, check_max_norm, clip_of, split_target
from gradscale.torch.counting import StepCount, postfix
from gradscale.torch.devices import device_type, is_there, warn_disabled
from gradscale.torch.fused import handed_over, is_fused, prepare_momentum, wants_scaler
from gradscale.torch.gradients import combine_norms, gather, read
from gradscale.torch.iteration import OpenStep, still_scaled
from gradscale.torch.late_backward import watch_backward
from gradscale.torch.ledger import Account, Ledger, new_account, new_ledger, record_of
from gradscale.torch.mailbox import Mailbox
from gradscale.torch.names import names_of
from gradscale.torch.scaling import loss_is_finite, map_outputs, times
from gradscale.torch.settling import Part, settle, settle_idle
from gradscale.torch.unscaling import inverse, multiply_

_NOT_SCALED = (
    "Attempted {name} but {what} is None.  This may indicate your script did not use "
    "scaler.scale(loss or outputs) earlier in the iteration."
)


def _fresh_state() -> dict[str, Any]:
    # Equal to torch's own, which torch.compile would refuse to call.
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class GradScaler(torch.amp.GradScaler):
    """Scale the loss, unscale the gradients, step or skip, move the scale.

    A drop-in for `torch.amp.GradScaler`: same arguments, methods, errors and
    checkpoints. It also says what became of each step (`last`), clips
    (`clip_grad_norm_`), and never lets a value that is not finite reach a weight.

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
            finite, and raises on misuse.
        model: Names the culprits by the model's parameter names. Not pickled.
        process_group: The ranks that decide together; None where gradients arrive
            reduced, as under DDP.
        kernels: "auto", or "plain" for plain torch operations only.
        allow_fp16: Accept float16 gradients in `unscale_` and with every optimizer.
        recheck: Read the gradients again in `step` after an explicit `unscale_`, so
            that what was written into them in between is checked too.
    """

    # The base class would set these on the instance; here they follow the policy.
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
        kernels: Literal["auto", "plain"] = "auto",
        allow_fp16: bool = False,
        recheck: bool = False,
    ) -> None:
        self._device = device_type(device)
        _check_choice("guard", guard, ("report", "raise"))
        _check_choice("kernels", kernels, ("auto", "plain"))
        self._enabled = bool(enabled)
        if self._enabled and not is_there(self._device):
            warn_disabled(self._device)
            self._enabled = False
        moves = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._policy = self._chosen(policy, moves) if self._enabled else NoScale()
        self._guard = guard
        self._model = model
        self._process_group = process_group
        self._kernels = kernels
        self._allow_fp16 = allow_fp16
        self._recheck = recheck
        first = self._policy.init_state()
        self._init_scale: float = first.scale
        self._init_growth_tracker = 0
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(
            _fresh_state
        )
        self._resumed = saving.Resumed()
        self._begin()

    def _begin(self) -> None:
        """Set what lives only as long as the process."""
        self._ledger: Ledger | None = None
        self._accounts: dict[int, Account] = {}
        self._open: dict[int, OpenStep] = {}
        # The readings behind `last`, by optimizer; empty before the first update.
        self._settled: dict[int, OpenStep] = {}
        # A clip of bare parameters counts for every optimizer of the iteration.
        self._params_clip: Clip | None = None
        self._scaled_since_update = False
        self._mailbox = Mailbox()
        self._watchman = guards.Watchman()
        self._disabled_steps = 0

    @staticmethod
    def _chosen(policy: AnyPolicy | None, moves: tuple[Any, ...]) -> AnyPolicy:
        if policy is not None:
            if moves != (2.0**16, 2.0, 0.5, 2000):
                raise ConfigError(
                    f"Both policy={policy!r} and scale settings {moves} were given. "
                    "Two sets of settings cannot both be used. Put the settings into "
                    "the policy, or leave the policy out.",
                    code="GS101",
                )
            return policy
        init_scale, growth_factor, backoff_factor, growth_interval = moves
        return DynamicScale(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            **saving.bounds_around(init_scale),
        )

    # --- scale -------------------------------------------------------------------

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
        scale, ledger = self._scale, self._ledger
        if scale is None or ledger is None:
            raise AssertionError("_scale should not be None after lazy init")
        finite = loss_is_finite(output)
        if finite is not None:
            ledger.loss_finite.mul_(finite.to(scale.device, non_blocking=True))
        ledger.used_scale.copy_(scale)
        self._scaled_since_update = True
        scaled = times(output, scale)
        if _host_may_act():
            watch_backward(scaled, self._unscaled_params, self._report_late_backward)
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

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        for what in ("_scale", "_growth_tracker"):
            if getattr(self, what) is None:
                raise OrderError(
                    f"{funcname} came before the first scale(). The gradients cannot "
                    "have been scaled. Call scaler.scale(loss).backward() first.",
                    code="GS102",
                    replaces=_NOT_SCALED.format(name=funcname, what=what),
                )
        assert self._scale is not None
        assert self._growth_tracker is not None
        return self._scale, self._growth_tracker

    # --- unscale and clip --------------------------------------------------------

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, in place. No host sync.

        A clip that was asked for before is applied in the same pass.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise _order(
                "unscale_() was called twice for one optimizer in one step. The "
                "gradients would be divided by the scale a second time. Call update() "
                "between steps, or remove the second unscale_().",
                "unscale_() has already been called on this optimizer since the last "
                "update().",
            )
        if state["stage"] is OptState.STEPPED:
            raise _order(
                "unscale_() was called after step(), which has already unscaled the "
                "gradients. Call unscale_() before step().",
                "unscale_() is being called after step().",
            )
        multiplier = self._multiplier(self._open_step(optimizer))
        found_inf = torch.zeros_like(multiplier)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, multiplier, found_inf, self._allow_fp16
        )
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self,
        optimizer: Any,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Read and multiply the gradients; return whether to skip, by device."""
        step = self._open_step(optimizer)
        found = self._look(step, inv_scale, found_inf, allow_fp16)
        if step.gradients is None or not found:
            return found
        others = [other for other in self._open.values() if other is not step]
        rest = still_scaled(step.gradients, others, self._names(optimizer))
        multiply_(rest, inv_scale)
        step.close()
        return found

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """Read the gradients and write nothing; the optimizer itself unscales."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        step = self._open_step(optimizer)
        found = self._look(step, self._multiplier(step), torch.zeros_like(scale), True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _look(
        self, step: OpenStep, multiplier: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Read one optimizer's gradients once; return whether to skip, by device."""
        self._read(step, allow_fp16, home=found_inf.device)
        gradients, reading = step.gradients, step.reading
        assert gradients is not None
        if gradients.present == 0:
            return {}
        if reading is None:
            found, amax = torch.zeros_like(found_inf), found_inf.reshape(())
        else:
            found, amax = reading.found(multiplier.reshape(())), reading.amax()
        step.found = found
        for clip in (step.clip, self._params_clip):
            if clip is not None:
                found = torch.maximum(found, clip.found)
        found, step.amax = agree(found, amax, self._process_group, gradients.sharded)
        found = torch.maximum(found_inf, found)
        devices = {t.device for t in gradients.tensors} or {found.device}
        return {device: found.to(device, non_blocking=True) for device in devices}

    def _read(
        self,
        step: OpenStep,
        allow_fp16: bool,
        home: torch.device,
        norm_type: float | None = None,
    ) -> None:
        """Bring the step's reading up to date; a reading that still holds is kept."""
        params = (p for g in step.optimizer.param_groups for p in g["params"])
        gradients = gather(
            params, allow_fp16=allow_fp16, names=self._names(step.optimizer)
        )
        step.gradients = gradients
        held = step.reading
        if held is not None and held.marks == gradients.marks and held.marks:
            if norm_type is None:
                return
        step.reading = None
        if gradients.tensors:
            step.reading = read(gradients, home, norm_type)

    def _multiplier(self, step: OpenStep) -> Tensor:
        """Return what turns this step's gradients into unscaled and clipped ones."""
        multiplier = inverse(self._scale_behind(step.optimizer))
        return multiplier if step.clip is None else multiplier * step.clip.coef

    def _scale_behind(self, optimizer: Any) -> Tensor:
        """Return the scale that multiplied the loss of this optimizer's gradients.

        After an `update()` without a new `scale()`, that is the scale before the
        update; but an optimizer that has stepped since then had its gradients from
        elsewhere: from a replayed graph, or from a loss multiplied by hand.
        """
        ledger, scale = self._ledger, self._scale
        assert ledger is not None
        assert scale is not None
        if not self._scaled_since_update and id(optimizer) in self._settled:
            ledger.used_scale.copy_(scale)
        return ledger.used_scale

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
            params += [
                p for o in optimizers for g in o.param_groups for p in g["params"]
            ]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        if params:
            return self._clip_params(params, max_norm, norm_type)
        one = torch.ones_like(scale)
        steps, factors, norms = [], [], []
        for optimizer in optimizers:
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is OptState.STEPPED:
                raise OrderError(
                    f"clip_grad_norm_() was called after step() of "
                    f"{type(optimizer).__name__}. Its gradients are already used. "
                    "Call clip_grad_norm_() before step().",
                    code="GS102",
                )
            step = self._open_step(optimizer)
            ready = stage is OptState.READY
            allowed = self._allow_fp16 or (ready and is_fused(optimizer))
            self._read(step, allowed, scale.device, norm_type)
            if step.reading is None or step.reading.norm is None:
                continue
            guards.refuse_sharded_norm(step.gradients, type(optimizer).__name__)
            factor = self._multiplier(step) if ready else one
            steps.append(step)
            factors.append(factor)
            norms.append(step.reading.norm * factor)
        if not norms:
            return 0.0 * one
        norm = combine_norms(norms, norm_type)
        for step, factor in zip(steps, factors, strict=True):
            self._clip_step(step, clip_of(norm, max_norm, factor))
        return norm.float()

    def _clip_step(self, step: OpenStep, clip: Clip) -> None:
        state = self._per_optimizer_states[id(step.optimizer)]
        if step.clip is not None:
            clip = clip._replace(
                coef=clip.coef * step.clip.coef,
                found=torch.maximum(clip.found, step.clip.found),
            )
        if state["stage"] is OptState.READY:
            step.clip = clip
            return
        assert step.gradients is not None
        multiply_(step.gradients.tensors, clip.coef)
        step.close()
        step.clip = clip._replace(coef=torch.ones_like(clip.coef))
        for device, found in state["found_inf_per_device"].items():
            skip = torch.maximum(found, clip.found.to(device, non_blocking=True))
            state["found_inf_per_device"][device] = skip

    def _clip_params(
        self, params: list[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip bare parameters at once: no step is known to fold the clip into."""
        scale, ledger = self._scale, self._ledger
        assert scale is not None
        assert ledger is not None
        gradients = gather(params, allow_fp16=True, names=(self._model,))
        guards.refuse_sharded_norm(gradients, "clip_grad_norm_")
        if not gradients.tensors:
            return torch.zeros_like(scale)
        closed = {id(p) for p in self._unscaled_params()}
        inv_scale = inverse(ledger.used_scale)
        norms, factors = [], []
        for unscaled in (False, True):
            here = [
                i
                for i, p in enumerate(gradients.params)
                if (id(p) in closed) is unscaled
            ]
            if not here:
                continue
            part = gradients._replace(tensors=[gradients.tensors[i] for i in here])
            norm = read(part, scale.device, norm_type).norm
            assert norm is not None
            factors.append(torch.ones_like(inv_scale) if unscaled else inv_scale)
            norms.append(norm * factors[-1])
        norm = combine_norms(norms, norm_type)
        clip = clip_of(norm, max_norm, torch.stack(factors).amin())
        multiply_(gradients.tensors, clip.coef)
        for step in self._open.values():
            if step.versions is not None:
                step.close()
        if self._params_clip is not None:
            found = torch.maximum(clip.found, self._params_clip.found)
            clip = clip._replace(found=found)
        self._params_clip = clip
        return clip.norm

    # --- step --------------------------------------------------------------------

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer if its gradients are finite, else leave all untouched.

        No host sync with fused optimizers, one flag read with any other.

        Returns:
            What `optimizer.step` returned, or None if it was not called.
        """
        if not self._enabled:
            self._disabled_steps += 1
            return optimizer.step(*args, **kwargs)
        if (args and callable(args[0])) or kwargs.get("closure") is not None:
            raise OrderError(
                "step() was given a closure. It would run backward on scaled "
                "gradients, or after they were checked. Run the closure yourself "
                "before step(), and leave it out here.",
                code="GS108",
                replaces="Closure use is not currently supported if GradScaler is "
                "enabled.",
            )
        kwargs.pop("closure", None)
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise _order(
                "step() was called twice for one optimizer. The second one would "
                "apply the same gradients again. Call update() after each step.",
                "step() has already been called since the last update().",
            )
        if is_fused(optimizer) and wants_scaler(optimizer):
            return self._step_older_protocol(optimizer, state, args, kwargs)
        returned = self._step_checked(optimizer, state, args, kwargs)
        state["stage"] = OptState.STEPPED
        return returned

    def _step_checked(
        self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: Any
    ) -> float | None:
        step = self._open_step(optimizer)
        fused = is_fused(optimizer)
        if state["stage"] is OptState.UNSCALED:
            if self._recheck:
                self._look_again(step, state)
        elif fused and not self._shares_gradients(step):
            self._check_inf_per_device(optimizer)
        else:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            self._watchman.warn_no_gradients(optimizer)
            return None
        if not fused:
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)
        found_inf = self._skip(state)
        if prepare_momentum(optimizer) and found_inf.item():
            guards.tell_scheduler(optimizer)
            return None
        grad_scale = None
        if state["stage"] is OptState.READY:
            grad_scale = self._scale_behind(optimizer)
            if step.clip is not None:
                grad_scale = grad_scale / step.clip.coef
        with handed_over(optimizer, grad_scale, found_inf):
            returned = optimizer.step(*args, **kwargs)
        step.close()
        return returned

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if self._skip(optimizer_state).item():
            guards.tell_scheduler(optimizer)
            return None
        return optimizer.step(*args, **kwargs)

    def _step_older_protocol(
        self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: Any
    ) -> float | None:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the "
            "passed optimizer. In the near future GradScaler registers `grad_scale: "
            "Tensor` and `found_inf: Tensor` to the passed optimizer and let the "
            "optimizer use them directly.",
            FutureWarning,
            stacklevel=3,
        )
        returned = optimizer.step(*args, grad_scaler=self, **kwargs)
        state["stage"] = OptState.STEPPED
        return returned

    def _look_again(self, step: OpenStep, state: dict[str, Any]) -> None:
        one = torch.ones_like(self._skip(state))
        held = step.amax
        again = self._look(step, one, self._skip(state), True)
        # The largest *scaled* magnitude stays the one of the first look.
        step.amax = held
        state["found_inf_per_device"] = again

    def _shares_gradients(self, step: OpenStep) -> bool:
        others = [o for o in self._open.values() if o.versions is not None]
        if not others:
            return False
        mine = {id(p) for g in step.optimizer.param_groups for p in g["params"]}
        return any(id(p) in mine for o in others for p in o.gradients.params)

    def _skip(self, state: dict[str, Any]) -> Tensor:
        """Return f32[], exactly 0 or 1, from the flags of all devices."""
        assert self._scale is not None
        flags = [
            flag.reshape(()).to(self._scale.device, non_blocking=True)
            for flag in state["found_inf_per_device"].values()
        ]
        skip = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        return (skip != 0.0).float()

    # --- update ------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale and end the step. No host sync.

        Args:
            new_scale: Taken instead of the rule's. A number out of the policy's bounds
                is refused; a tensor is not read on the host: out of the bounds, it is
                ignored and reported two steps later.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        forced = guards.checked_scale(new_scale, self._policy, self._device, scale)
        parts, idle = self._parts()
        if not parts and not idle and forced is None:
            raise _order(
                "update() was called although no optimizer stepped since the last "
                "one. There is nothing to move the scale by. Call step(optimizer) "
                "first, or reset() to abandon the iteration.",
                "No inf checks were recorded prior to update.",
            )
        ledger = self._ledger
        assert ledger is not None
        if parts or forced is not None:
            settle(
                self._policy,
                self._state(),
                ledger,
                parts,
                hold_on_bad_loss=self._guard == "raise",
                forced_scale=forced,
            )
        if not parts and idle:
            settle_idle(ledger, [self._accounts[key] for key in idle])
        self._end_iteration()
        if _host_may_act():
            late = self._mailbox.exchange(ledger.total.row)
            if late is not None:
                self._watchman.act(late, self._policy, lambda: self.last)

    def _parts(self) -> tuple[list[Part], list[int]]:
        """Return what each optimizer contributes, and the keys of the idle ones."""
        parts, idle = [], []
        for key, state in self._per_optimizer_states.items():
            if not state["found_inf_per_device"]:
                if state["stage"] is not OptState.READY and key in self._open:
                    idle.append(key)
                continue
            step = self._open.get(key, OpenStep(None))
            clip = step.clip or self._params_clip
            skip = self._skip(state)
            parts.append(
                Part(
                    account=self._account(key),
                    stepped=state["stage"] is OptState.STEPPED,
                    skip=skip,
                    found=skip if step.found is None else step.found.reshape(()),
                    norm_found=None if clip is None else clip.found,
                    norm=None if clip is None else clip.norm,
                    amax=step.amax,
                )
            )
        return parts, idle

    def _end_iteration(self) -> None:
        self._settled = {
            key: self._open.get(key, OpenStep(None))
            for key in self._per_optimizer_states
        }
        for step in self._settled.values():
            # Only the reading is looked at later: let go of the gradients.
            step.gradients = None
        self._forget()

    def _forget(self) -> None:
        self._per_optimizer_states = defaultdict(_fresh_state)
        self._open = {}
        self._params_clip = None
        self._scaled_since_update = False

    def reset(self, optimizer: Any = None) -> None:
        """Forget an iteration that is abandoned: no step, no move of the scale.

        The gradients are left as they are; zero them before the next backward.

        Args:
            optimizer: Forget only what concerns this one.
        """
        if not self._enabled:
            return
        if optimizer is not None:
            self._per_optimizer_states.pop(id(optimizer), None)
            self._open.pop(id(optimizer), None)
        if optimizer is None or not self._open:
            self._forget()
            if self._ledger is not None:
                self._ledger.loss_finite.fill_(1.0)

    # --- what became of it -------------------------------------------------------

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last `update()`; None before the first.

        Making it costs no sync; reading a field may. `last[optimizer]` is the outcome
        of one optimizer.
        """
        if not self._enabled:
            done = StepRecord(self._disabled_steps, 1.0, applied=True, finite=True)
            return StepOutcome(lambda: done, tuple) if self._disabled_steps else None
        if self._ledger is None or not self._settled:
            return None
        settled = self._settled
        parts = {
            key: self._outcome(self._accounts[key], [step])
            for key, step in settled.items()
            if key in self._accounts
        }
        whole = self._outcome(self._ledger.total, list(settled.values()))
        return StepOutcome(whole._read_record, whole._read_culprits, parts)

    def _outcome(self, account: Account, steps: list[OpenStep]) -> StepOutcome:
        # Copies: the next update writes into the same tensors.
        row, tally = account.row.clone(), account.tally.clone()

        def culprits() -> tuple[str, ...]:
            return tuple(
                name
                for step in steps
                if step.reading is not None
                for name in names_of(
                    step.reading.culprits(), self._names(step.optimizer)
                )
            )

        return StepOutcome(
            lambda: record_of(row.tolist(), int(tally[0].item())), culprits
        )

    def _count(self, place: int) -> StepCount:
        if not self._enabled:
            return StepCount(self._disabled_steps if place == 1 else 0, {})
        if self._ledger is None:
            total = self._resumed.tallies[0] if self._resumed.tallies else (0, 0)
            return StepCount(total[place - 1], {})
        each = {key: int(a.tally[place].item()) for key, a in self._accounts.items()}
        return StepCount(int(self._ledger.total.tally[place].item()), each)

    @property
    def applied_steps(self) -> StepCount:
        """How many steps were taken; `applied_steps[optimizer]` for one. Syncs."""
        return self._count(1)

    @property
    def skipped_steps(self) -> StepCount:
        """How many steps were skipped; `skipped_steps[optimizer]` for one. Syncs."""
        return self._count(2)

    def postfix(self) -> str:
        """Return the scale and the skips for a progress bar. Syncs."""
        skipped = self.skipped_steps
        return postfix(self.get_scale(), skipped, skipped + self.applied_steps)

    # --- settings, checkpoints ---------------------------------------------------

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
        if not isinstance(self._policy, DynamicScale):
            raise ConfigError(
                f"{setting} was set on a scaler with {self._policy!r}, whose scale "
                "never moves. Use DynamicScale, or leave the setting alone.",
                code="GS101",
            )
        self._policy = replace(self._policy, **setting)

    # Names of torch's class that public code reads and writes.
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
        return saving.pack_scaler(self) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class or of torch's returned.

        A state that cannot be used is refused and nothing is changed. Does nothing if
        disabled.
        """
        if self._enabled:
            saving.load_into(self, unpack(state_dict, self._policy))

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise _order(
                "The scaler was pickled or copied in the middle of an iteration. What "
                "the optimizers have done so far would be lost. Do it after update().",
                "A GradScaler instance may only be pickled at the beginning of an "
                "iteration, or at the end after scaler.update().",
            )
        return saving.frozen(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # --- the rest ----------------------------------------------------------------

    def _found_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def _state(self) -> FixedState | ScaleState:
        """Return the tensors that hold the policy's state."""
        ledger = self._ledger
        assert ledger is not None
        if isinstance(self._policy, DynamicScale):
            return ScaleState(self._scale, self._growth_tracker, ledger.debt)
        return FixedState(self._scale)

    def _open_step(self, optimizer: Any) -> OpenStep:
        key = id(optimizer)
        if key not in self._open:
            self._open[key] = OpenStep(optimizer)
            if self._ledger is not None:
                self._account(key)
        return self._open[key]

    def _account(self, key: int) -> Account:
        if key not in self._accounts:
            assert self._ledger is not None
            counts = self._resumed.next_tally(len(self._accounts))
            self._accounts[key] = new_account(self._ledger.debt.device, *counts)
        return self._accounts[key]

    def _names(self, optimizer: Any) -> tuple[Any, ...]:
        return (self._model, optimizer)

    def _unscaled_params(self) -> list[Tensor]:
        return [
            param
            for key, step in self._open.items()
            if self._per_optimizer_states[key]["stage"] is OptState.UNSCALED
            and step.gradients is not None
            for param in step.gradients.params
        ]

    def _report_late_backward(self, params: list[Tensor]) -> None:
        sources = [self._model, *(step.optimizer for step in self._open.values())]
        guards.report_late_backward(names_of(params, sources), self._guard == "raise")


def _order(message: str, torch_says: str) -> OrderError:
    return OrderError(message, code="GS102", replaces=torch_says)


def _check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is not one of {', '.join(map(repr, choices))}. "
            "Nothing would answer to it. Pass one of these, or leave it out.",
            code="GS101",
        )


def _host_may_act() -> bool:
    """Return False while a graph is compiled or captured: it must hold no host work."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
