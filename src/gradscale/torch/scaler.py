"""`GradScaler`: the interface of torch.amp.GradScaler around the core's rule.

The gradients of an `OptimizerStep` are collected, read, decided on, then applied;
`update` moves the scale and ends the step. All methods that torch.compile traces are
defined here: `fullgraph=True` refuses those inherited from torch.amp.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.core.checkpoint import AnyPolicy, torch_settings, unpack
from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import DynamicScale, NoScale
from gradscale.core.state import FixedState, ScaleState
from gradscale.errors import ConfigError, check_choice
from gradscale.recording.console import say
from gradscale.recording.recorder import Recorder
from gradscale.torch import checkpoint, messages
from gradscale.torch.device_state.async_copy import AsyncFlag
from gradscale.torch.device_state.layout import (
    ROW,
    DeviceState,
    new_device_state,
)
from gradscale.torch.device_state.loss_stats import note_loss_
from gradscale.torch.device_state.update import (
    StepSummary,
    force_scale_,
    update_,
    update_idle_,
)
from gradscale.torch.devices import (
    can_touch_host,
    device_type,
    is_available,
    outside_inference_mode,
    warn_disabled,
)
from gradscale.torch.grads.clip import (
    check_max_norm,
    split_target,
)
from gradscale.torch.grads.unscale import zero_where_
from gradscale.torch.kernels import Kernels
from gradscale.torch.locate.autograd_graph import leaves_of, nodes_of
from gradscale.torch.locate.diagnose import diagnose
from gradscale.torch.locate.result import Location
from gradscale.torch.monitor.loop_check import live_optimizers
from gradscale.torch.monitor.model_lookup import find_model
from gradscale.torch.monitor.monitor import Monitor
from gradscale.torch.monitor.recorder import process_here
from gradscale.torch.names import names_of
from gradscale.torch.precision.buffers import BufferGuard
from gradscale.torch.precision.float16_params import Float16Check
from gradscale.torch.precision.losses import (
    MAIN,
    LossId,
    LossScales,
    check_loss_id,
    merge_,
    stash_grads,
)
from gradscale.torch.ranks.consensus import RankChannel, Ranks
from gradscale.torch.ranks.sharding import (
    is_distributed,
    is_single_process,
    replicas_of,
)
from gradscale.torch.scaled_loss import is_scaled, map_outputs, mark_scaled, times
from gradscale.torch.step.amp_protocol import amp_attributes, prepare_momentum
from gradscale.torch.step.backward_check import watch_backward
from gradscale.torch.step.clipping import clip_bare_params, clip_steps
from gradscale.torch.step.dispatch import Path, StepMode, needs_closure, path_of
from gradscale.torch.step.entries import OptimizerEntries
from gradscale.torch.step.foreign_grads import are_handed_on
from gradscale.torch.step.iteration import Iteration, params_of, skip_of
from gradscale.torch.step.optimizer_step import OptimizerStep
from gradscale.torch.step.outcome import (
    DisabledCounter,
    StepCount,
    count_of,
    outcome_of,
    postfix,
)
from gradscale.torch.tensor_list import GradSnapshot
from gradscale.torch.underflow.meter import Meter

_SKIPPED = ROW.index("skipped")


class GradScaler(torch.amp.GradScaler):
    """Scale the loss, unscale the gradients, step or skip, move the scale.

    A drop-in for `torch.amp.GradScaler`: same arguments, methods, errors and
    checkpoints. It also reports the outcome of each step (`last`), clips
    (`clip_grad_norm_`), and skips every step whose gradients are not finite when they
    are read, or would not be once unscaled.

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
        policy: Settings and rule in one object, instead of the four numbers above.
        guard: "report" moves the scale as torch does and raises where torch would,
            and at the floor. "raise" also holds the scale while the loss is not
            finite on any rank, and raises on misuse. Under DDP, pass the wrapped model
            as `model`, or `process_group`: without it the losses of other ranks are
            not known, and the scale is not held.
        model: Its parameter names identify the culprits. Not pickled.
        process_group: The ranks that decide together, each of which holds gradients
            of its own. None to derive them from the parameters: the ranks of DTensors
            (FSDP2, tensor parallelism) and of FSDP1, or this rank alone where gradients
            arrive reduced, as under DDP.
        kernels: "auto" for Triton where it runs, "plain" for plain torch operations
            only, "triton" to require it.
        allow_fp16: Accept float16 gradients in `unscale_` and with every optimizer. One
            without master weights whose `eps` is 0 in float16 is refused.
        recheck: Read the gradients again in `step` after an explicit `unscale_`, so
            that writes in between are checked too.
        record: The run file to write, usually ending in .gs; None for none. Rank 0
            writes it. If the file exists, the name gets a number: run.2.gs. A folder
            that does not exist is refused. Not pickled.
        sinks: Each gets every step's record and judgement: see `gradscale.sinks`. Not
            pickled.
        guard_buffers: Restore the buffers of `model`, such as the running statistics of
            BatchNorm, after a skipped step. Copies them once per step, without a sync.
            Not pickled.
        on_skip: "keep" leaves the gradients of a skipped step in place, as torch does;
            "clear" removes them, so that no later backward adds to them. Fused
            optimizers then take one more pass over the gradients.
    """

    _frames_to_caller: ClassVar[int] = 3
    _always_together: ClassVar[bool] = False
    _refuses_eps: ClassVar[bool] = True

    # The __init__ of the base class is not called: it sets its attributes without
    # bounds and checks.
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
        guard_buffers: bool = False,
        on_skip: Literal["keep", "clear"] = "keep",
    ) -> None:
        self._device = device_type(device)
        check_choice("guard", guard, ("report", "raise"))
        check_choice("on_skip", on_skip, ("keep", "clear"))
        if guard_buffers and model is None:
            raise messages.no_buffers()
        check_choice("kernels", kernels, ("auto", "plain", "triton"))
        self._enabled = bool(enabled)
        if self._enabled and not is_available(self._device):
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
        self._guard_buffers, self._on_skip = guard_buffers, on_skip
        self._init_scale: float = self._policy.init_state().scale
        self._init_growth_tracker = 0
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._resumed = checkpoint.Resumed()
        self._loaded = False
        self._begin()
        if self._enabled and model is not None and not allow_fp16:
            self._float16.check_model(model, live_optimizers())

    def _begin(self) -> None:
        """Set the attributes that live only as long as the process."""
        self._state: DeviceState | None = None
        self._iteration = Iteration()
        self._warn = self._make_warnings()
        self._monitor = Monitor(
            guard=self._guard,
            model=self._model,
            recorder=self._recorder(),
            sinks=self._sinks,
            kernels=self._kernels,
            warn=self._warn,
        )
        self._ranks = Ranks(
            self._process_group,
            always=self._always_together,
            replicas=replicas_of(self._model),
            share_losses=self._guard == "raise",
        )
        self._float16 = Float16Check(
            allowed=self._allow_fp16,
            refuses_eps=self._refuses_eps,
            as_error=self._guard == "raise",
            warn=self._warn,
        )
        # Weak: an optimizer must not keep the scaler alive.
        forget = weakref.WeakMethod(self._forget)
        self._entries = OptimizerEntries(
            self._kernels, lambda *gone: (there := forget()) and there(*gone)
        )
        self._disabled_steps = DisabledCounter()
        self._loss_scales = LossScales(self._resumed.losses)
        self._buffers: BufferGuard | None = None
        if self._guard_buffers and self._enabled and self._model is not None:
            self._buffers = BufferGuard(self._model)

    def _forget(self, key: int, param_groups: list[dict[str, Any]]) -> None:
        """Release an optimizer that was deleted."""
        self._ranks.forget(key)
        self._iteration.drop(key, param_groups)
        self._monitor.drop(key, param_groups)

    def _make_warnings(self) -> messages.WarnOnce:
        return messages.WarnOnce()

    def _recorder(self) -> Recorder | None:
        """Return the given recorder, or one for the given path."""
        if self._record is None:
            return None
        if not self._enabled:
            quiet = isinstance(self._record, Recorder) and self._record.quiet
            text = "the scaler is disabled, so no run file is written [GS308]"
            say(text, rank=-1 if quiet else process_here().rank, normal=True)
            return None
        model, given = self._model, self._record
        recorder = given if isinstance(given, Recorder) else Recorder(given)

        def names() -> list[str]:
            named = () if model is None else model.named_parameters()
            return [name for name, _ in named]

        recorder.bind(policy=self._policy, names=names, process=process_here)
        return recorder

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...

    @overload
    def scale(self, outputs: list[Tensor]) -> list[Tensor]: ...

    @overload
    def scale(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...

    def scale(self, outputs: Any) -> Any:
        """Return the outputs times the scale. No host sync.

        Args:
            outputs: A tensor, or a nest of lists, tuples and other iterables of them.
                A half-precision loss of one element is scaled in f32.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return self._scale_one(outputs)
        return map_outputs(outputs, self._scale_one)

    def _scale_one(self, output: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        scale, state, iteration = self._scale, self._state, self._iteration
        assert scale is not None
        assert state is not None
        if self._loss_scales.in_block:
            raise messages.inside_loss_block("scale")
        if iteration.first and can_touch_host() and is_scaled(output):
            self._warn.scaled_twice(self._guard == "raise")
        iteration.noted = not torch._C._are_functorch_transforms_active()
        if iteration.noted:
            first = iteration.losses == 0
            iteration.losses += note_loss_(output, scale, state, first=first)
        iteration.scaled = True
        self._monitor.scaled_losses += 1
        self._ranks.losses_are_known = False
        scaled = times(output, scale)
        if can_touch_host():
            if iteration.first and iteration.noted:
                leaves = leaves_of(nodes_of([scaled]), [scaled])
                iteration.leaves.update(
                    (id(leaf), weakref.ref(leaf)) for leaf in leaves
                )
                iteration.first_backwards.watch(leaves)
                mark_scaled(scaled)
            if self._monitor.module_hooks.enabled:
                self._monitor.module_hooks.watch_loss(scaled, output)
            watch_backward(scaled, iteration, state.used_scale, self._report_mixture)
            if self._monitor.loop.due:
                self._monitor.loop.scaled(scaled, output, iteration)
        return scaled

    @contextmanager
    def loss(self, loss: Tensor, id: LossId = MAIN) -> Iterator[Tensor]:
        """Scale one of several losses by a scale of its own. No host sync.

        The block runs the backward pass of the scaled loss. On exit the gradients are
        rescaled to the scaler's scale and added to those of other losses. A loss that
        overflows lowers only its own scale, and skips the optimizers whose parameters
        have received a gradient from it.

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = GradScaler("cpu")
        >>> with scaler.loss(weight.sum(), id="task") as scaled:
        ...     scaled.backward()
        >>> with scaler.loss(weight.square().sum(), id="penalty") as scaled:
        ...     scaled.backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.tolist(), scaler.loss_scale("penalty")
        ([-2.0, -2.0], 65536.0)

        Args:
            loss: The loss before scaling.
            id: Identifies it, also in a checkpoint; 0 for the scaler's own scale, which
                `scale()` uses.
        """
        check_loss_id(id)
        if not self._enabled:
            yield loss
            return
        if self._loss_scales.in_block:
            raise messages.inside_loss_block("loss")
        if self._iteration.first and is_scaled(loss):
            self._warn.scaled_twice(self._guard == "raise")
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        (common, state), iteration = self._required("loss"), self._iteration
        scale = common
        if id != MAIN:
            scale = self._loss_scales.scale(id, self._policy, common.device)
        first = iteration.losses == 0
        counted = note_loss_(loss, common, state, first=first)
        iteration.losses += counted
        iteration.scaled = iteration.noted = True
        self._loss_scales.contexts += counted
        self._monitor.scaled_losses += 1
        self._monitor.loop.scaled_in_block()
        self._ranks.losses_are_known = False
        scaled = times(loss, scale)
        iteration.bring_to(state.used_scale)
        sources = (self._model, *self._entries.others(()))
        leaves = leaves_of(nodes_of([scaled]), [scaled])
        # The leaves of FSDP are not the parameters that get the gradients.
        own = () if self._model is None else self._model.parameters()
        stash, closed = stash_grads([*leaves, *self._entries.params(), *own]), []
        if can_touch_host():
            closed = iteration.closed_params()
            if iteration.first and scaled.grad_fn is not None:
                iteration.first_backwards.watch(stash.params)
                mark_scaled(scaled)
                scaled.grad_fn.register_prehook(partial(self._begin_in_block, id))
        self._loss_scales.in_block = True
        loop = self._monitor.loop
        try:
            loop.foreign.in_scaled_backward = True
            yield scaled
            iteration.backwards += 1
            self._check_foreign(stash.params)
            changed = [param for param in closed if param.grad is not None]
            if changed:
                self._report_mixture(changed, "closed")
            found = merge_(stash, scale, state.used_scale, sources)
        except BaseException:
            stash.put_back()
            raise
        finally:
            self._loss_scales.in_block = False
            loop.foreign.in_scaled_backward = False
        self._loss_scales.note(id, found)

    def _check_writes(self, step: OptimizerStep) -> None:
        """Report a clip of scaled gradients, or a division by the scale."""
        watched = self._iteration.first_backwards
        how = watched.write_to(step.params(), self._init_scale)
        if how is not None:
            self._warn.early_write(how, self._init_scale, self._guard == "raise")

    def _begin_in_block(self, id: LossId, _: object) -> None:
        # After the block, gradients are not rescaled to the common scale.
        if id == MAIN or self._loss_scales.in_block:
            self._iteration.first_backwards.begin_scaled()

    def _check_foreign(self, params: Iterable[Tensor]) -> None:
        """Report gradients accumulated from an unscaled loss."""
        found = self._iteration.first_backwards.among(params)
        if found and not are_handed_on(
            [leaf() for leaf in self._iteration.leaves.values()],
            {id(param) for param in self._entries.params()},
        ):
            self._report_mixture(found, "foreign")

    def loss_scale(self, id: LossId = MAIN) -> float:
        """Return the scale of one of several losses; 1.0 if disabled. Syncs.

        Raises:
            ConfigError: No such loss was scaled yet.
        """
        if id == MAIN or not self._enabled:
            return self.get_scale()
        return self._loss_scales.value(id)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        with outside_inference_mode():
            self._scale = torch.full(
                (), self._init_scale, dtype=torch.float32, device=dev
            )
            self._growth_tracker = torch.full(
                (), self._init_growth_tracker, dtype=torch.int32, device=dev
            )
            self._state = new_device_state(dev, self._init_scale)
        self._resumed.enter(self._state)
        self._entries.start(dev, self._resumed.each())
        self._monitor.meter.start(self._state.total.start)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is None or tracker is None:
            raise messages.not_scaled(
                funcname, "_scale" if scale is None else "_growth_tracker"
            )
        return scale, tracker

    def _required(self, funcname: str) -> tuple[Tensor, DeviceState]:
        """Return the scale and the device state, made with the first loss."""
        scale, state = self._scale, self._state
        if scale is None or self._growth_tracker is None:
            self._check_scale_growth_tracker(funcname)
        assert scale is not None
        assert state is not None
        return scale, state

    def _scale_of_grads(self, step: OptimizerStep) -> Tensor:
        """Return f32[], the scale that multiplied the loss of a step's gradients."""
        assert self._scale is not None
        assert self._state is not None
        return self._iteration.scale_of_grads(step, self._scale, self._state.used_scale)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, in place. No host sync.

        A clip that was requested before is applied in the same pass.
        """
        if not self._enabled:
            return
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with outside_inference_mode():
                self.unscale_(optimizer)
            return
        step = self._open(optimizer, "unscale_")
        state = self._iteration.states[id(optimizer)]
        stage = state["stage"]
        if step.unscaled_before and stage is OptState.UNSCALED:
            return
        if stage is not OptState.READY:
            raise messages.unscaled_before(stage is OptState.STEPPED)
        if self._is_replaced("_unscale_grads_"):
            scale = self._scale_of_grads(step)
            flags = self._unscale_grads_(
                optimizer,
                scale.reciprocal(),
                torch.zeros_like(scale),
                self._allow_fp16,
            )
        else:
            allowed = self._allow_fp16 or step.mode is StepMode.MASTERS
            # The meter samples what backward has left, and another optimizer may have
            # unscaled some of these gradients.
            used = any(s.versions is not None for s in self._iteration.steps.values())
            both = not (used or self._monitor.meter.wanted)
            step.collect(allowed)
            assert self._scale is not None
            assert self._state is not None
            used_scale = self._state.used_scale
            scale = self._iteration.scale_of_grads(step, self._scale, used_scale)
            if step.stats is None:
                step.read(scale, unscale=both)
            flags = self._unscale_read(step, scale)
        # Without gradients, those of gradients that were cleared since.
        state["found_inf_per_device"] = flags or state["found_inf_per_device"]
        state["stage"] = OptState.UNSCALED
        if step.clip is not None:
            step.clip = step.clip.applied()

    def _unscale_read(
        self, step: OptimizerStep, scale: Tensor
    ) -> dict[torch.device, Tensor]:
        """Decide on gradients that were read, and multiply them in place."""
        flags = self._iteration.decide(step, scale, divide=False)
        if flags:
            assert step.decision is not None
            waits = step.mode is StepMode.FLAG and len(flags) == 1
            if waits and can_touch_host():
                # Before anything else is queued.
                step.flag = AsyncFlag(step.decision.skip)
            if self._monitor.meter.wanted:
                self._sample(step)
            others = [s for s in self._iteration.steps.values() if s is not step]
            step.unscale_(others, step.decision.multiplier)
        return flags

    def _sample(self, step: OptimizerStep) -> None:
        """Sample the gradients for the underflow meter, as backward left them."""
        meter = self._monitor.meter
        if not meter.wanted or step.snapshot is None or not can_touch_host():
            return
        others = self._iteration.steps.values()
        clipped = self._iteration.params_clip_of(step)
        untouched = step.versions is None and clipped is None
        if untouched and not step.shares_with(others):
            scale = self._scale_of_grads(step)
            meter.sample(step.snapshot, scale, step.name_sources, step.stats)

    def _sample_bare(self, gradients: GradSnapshot, scale: Tensor) -> None:
        """Sample gradients for the underflow meter before a clip writes to them."""
        if self._monitor.meter.wanted and can_touch_host():
            namer: Any = self._model
            if namer is None:
                namer = self._monitor.model_lookup.of_params(gradients.params)
            self._monitor.meter.sample(gradients, scale, (namer,))

    # --- Torch's private methods, for code that calls or replaces them -------------

    def _is_replaced(self, name: str) -> bool:
        """Return whether a subclass or an attribute replaces one of these methods."""
        own = getattr(GradScaler, name)
        return name in self.__dict__ or getattr(type(self), name) is not own

    def _unscale_grads_(
        self,
        optimizer: Any,
        inv_scale: Tensor,
        found_inf: Tensor | None,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Read and multiply the gradients; return whether to skip, by device."""
        step = self._open(optimizer)
        factor = inv_scale.reshape(())
        scale = factor.reciprocal()
        step.collect(allow_fp16)
        step.read(scale)
        step.decision = None
        step.decide(scale, divide=False, inv_scale=factor)
        flags = self._unscale_read(step, scale)
        if found_inf is None:
            return flags
        return {
            device: torch.maximum(flag.view_as(found_inf), found_inf.to(device))
            for device, flag in flags.items()
        }

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """Read the gradients and write nothing; the optimizer itself unscales."""
        step = self._open(optimizer, "_check_inf_per_device")
        assert self._scale is not None
        assert self._state is not None
        step.collect(allow_fp16=True)
        used_scale = self._state.used_scale
        scale = self._iteration.scale_of_grads(step, self._scale, used_scale)
        if step.stats is None:
            step.read(scale)
        flags = self._iteration.decide(step, scale, divide=True)
        if self._monitor.meter.wanted:
            self._sample(step)
        state = self._iteration.states[id(optimizer)]
        state["found_inf_per_device"] = flags or state["found_inf_per_device"]
        return flags

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        flags = list(optimizer_state["found_inf_per_device"].values())
        step = self._iteration.steps.get(id(optimizer)) or OptimizerStep()
        if step.flag is not None and len(flags) == 1 and step.flag.is_current(flags[0]):
            skip = step.flag.is_set()
        else:
            # No flag was copied in advance, or the decision has changed since.
            scale, _ = self._check_scale_growth_tracker("step")
            skip_flag = skip_of(
                optimizer_state["found_inf_per_device"], step, scale.device
            )
            skip = bool(skip_flag.item())
        if skip:
            self._skip(optimizer)
            return None
        return optimizer.step(*args, **kwargs)

    def _skip(self, optimizer: Any) -> None:
        """Skip the step of an optimizer that cannot skip by itself."""
        messages.mark_called(optimizer)
        if self._on_skip == "clear":
            optimizer.zero_grad(set_to_none=True)

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def clip_grad_norm_(
        self, target: Any, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the unscaled gradients by their joint norm. No host sync.

        Correct both before and after `unscale_`. Before it, the clip of an optimizer is
        folded into its step, and `.grad` is unspecified until then. A norm that is
        not a usable f32 skips the step.

        Args:
            target: An optimizer, several, or parameters.
            max_norm: The maximum norm.
            norm_type: The order of the norm; inf for the largest magnitude.

        Returns:
            f32[], the norm of the unscaled gradients before clipping.
        """
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with outside_inference_mode():
                return self.clip_grad_norm_(target, max_norm, norm_type)
        max_norm, norm_type = check_max_norm(max_norm, norm_type)
        optimizers, params = split_target(target)
        if not self._enabled:
            groups = [group for opt in optimizers for group in opt.param_groups]
            params += [param for group in groups for param in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        if params:
            return self._clip_params(params, max_norm, norm_type)
        scale, state = self._required("clip_grad_norm_")
        return clip_steps(
            self._iteration,
            [self._open(optimizer, "clip_grad_norm_") for optimizer in optimizers],
            max_norm,
            norm_type,
            scale=scale,
            used_scale=state.used_scale,
            allow_fp16=self._allow_fp16,
        )

    def _clip_params(
        self, params: list[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        scale, state = self._required("clip_grad_norm_")
        return clip_bare_params(
            self._iteration,
            params,
            max_norm,
            norm_type,
            scale=scale,
            used_scale=state.used_scale,
            model=self._model,
            channel=self._channel(-1, params) if is_distributed() else None,
            before_write=self._sample_bare,
        )

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer if its gradients are finite, else change nothing.

        No host sync with fused optimizers, one flag read with any other.

        Returns:
            The result of `optimizer.step`, or None if it was not called.
        """
        if not self._enabled:
            self._disabled_steps.step(optimizer)
            return optimizer.step(*args, **kwargs)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with outside_inference_mode():
                return self.step(optimizer, *args, **kwargs)
        if (args and callable(args[0])) or kwargs.get("closure") is not None:
            raise messages.closure_given()
        kwargs.pop("closure", None)
        step = self._open(optimizer, "step")
        state = self._iteration.states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise messages.stepped_before()
        if not self._iteration.settled and not self._loaded and can_touch_host():
            self._check_resumed(optimizer)
        entry = step.entry
        if entry is not None and not entry.checked and can_touch_host():
            if not args and needs_closure(optimizer):
                raise messages.closure_wanted(optimizer)
            if not self._is_replaced("_unscale_grads_"):
                # A library that replaces it accepts float16 on purpose.
                self._float16.check_step(step)
            entry.checked = True
        if step.mode is StepMode.OLDER:
            returned = self._step_older_protocol(optimizer, args, kwargs)
        else:
            self._prepare(step, state)
            if not self._iteration.settled and can_touch_host():
                self._monitor.keep_weights(step)
            self._monitor.loop.stepping = True
            try:
                returned = self._apply(step, state, args, kwargs)
            finally:
                self._monitor.loop.stepping = False
        state["stage"] = OptState.STEPPED
        if not torch.compiler.is_compiling():
            step.mark_stepped(self._iteration.backwards)
        return returned

    def _check_resumed(self, optimizer: Any) -> None:
        """Report an optimizer that had taken steps before the scaler's first."""
        moves = isinstance(self._policy, DynamicScale)
        # Steps since the scaler was made do not mean that the optimizer was resumed.
        if not self._monitor.loop.has_stepped(optimizer):
            self._monitor.resumed |= self._warn.without_state(
                optimizer, self._init_scale, moves=moves
            )

    def _prepare(self, step: OptimizerStep, state: dict[str, Any]) -> None:
        """Read the gradients and decide; unscale them if the optimizer does not."""
        optimizer = step.optimizer
        unscaled = state["stage"] is OptState.UNSCALED
        if unscaled and not state["found_inf_per_device"]:
            # There was no gradient then; there may be one now.
            state["stage"], unscaled = OptState.READY, False
        if unscaled:
            if self._monitor.loop.due and can_touch_host():
                loop, scale = self._monitor.loop, self._scale_of_grads(step)
                loop.before_unscaled_step(step, scale)
            if self._recheck:
                flags = state["found_inf_per_device"]
                skip = skip_of(flags, step, self._required("step")[0].device)
                state["found_inf_per_device"] = step.check_again(flags, skip)
        elif step.mode is StepMode.FLAG or step.shares_with(
            self._iteration.steps.values()
        ):
            self.unscale_(optimizer)
        else:
            self._check_inf_per_device(optimizer)
            if step.snapshot is not None and step.snapshot.shared:
                # The kernel would divide the same memory twice.
                step.decision = None
                self.unscale_(optimizer)

    def _apply(
        self, step: OptimizerStep, state: dict[str, Any], args: Any, kwargs: Any
    ) -> float | None:
        """Step the optimizer, or skip."""
        optimizer = step.optimizer
        flags = state["found_inf_per_device"]
        if not flags:
            self._warn.no_gradients(optimizer)
            return None
        if step.mode is StepMode.FLAG:
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)
        scale, device_state = self._scale, self._state
        assert scale is not None
        assert device_state is not None
        skip = found_inf = skip_of(flags, step, scale.device)
        if prepare_momentum(optimizer) and skip.item():
            self._skip(optimizer)
            return None
        grad_scale = still_scaled = snapshot = None
        if state["stage"] is OptState.READY:
            grad_scale = scale_of_loss = self._iteration.scale_of_grads(
                step, scale, device_state.used_scale
            )
            # Not decided if a subclass checks the gradients by itself.
            if step.decision is not None:
                grad_scale = step.decision.grad_scale
            where = skip if step.mode is StepMode.FUSED else device_state.one
            still_scaled = where, scale_of_loss
            if step.mode is StepMode.OWN and step.snapshot is not None:
                snapshot = step.snapshot if step.snapshot.kind is not None else None
            if step.mode is StepMode.FUSED and step.entry is not None:
                # For unscaled gradients torch's kernel takes the host less time.
                found_inf = step.entry.stand_in.flag(optimizer, skip)
        with amp_attributes(optimizer, grad_scale, found_inf, snapshot):
            returned = optimizer.step(*args, **kwargs)
        if self._on_skip == "clear":
            grads = [param.grad for param in step.params() if param.grad is not None]
            zero_where_(grads, skip)
        step.mark_unscaled(still_scaled, written=snapshot is None)
        return returned

    def _step_older_protocol(
        self, optimizer: Any, args: Any, kwargs: Any
    ) -> float | None:
        # Same message as torch, so existing warning filters still match.
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the "
            "passed optimizer. In the near future GradScaler registers `grad_scale: "
            "Tensor` and `found_inf: Tensor` to the passed optimizer and let the "
            "optimizer use them directly.",
            FutureWarning,
            stacklevel=3,
        )
        return optimizer.step(*args, grad_scaler=self, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale and end the step. No host sync.

        Args:
            new_scale: Used instead of the rule's scale. A number outside the policy's
                bounds is refused. A tensor on a device is not read on the host:
                outside the bounds, it is ignored and reported some updates later.
        """
        if not self._enabled:
            self._disabled_steps.update()
            return
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with outside_inference_mode():
                self.update(new_scale)
            return
        scale, state = self._required("update")
        if self._loss_scales.in_block:
            raise messages.inside_loss_block("update")
        forced = None
        if new_scale is not None:
            forced = messages.checked_scale(
                new_scale, self._policy, self._device, scale
            )
        steps, idle = self._iteration.summaries(
            self._entries, state.used_scale, scale.device
        )
        rule_skip = None
        if steps and self._loss_scales.found:
            rule_skip = self._end_losses(steps)
            if rule_skip is None and forced is None:
                # No loss used the scaler's own scale, so it stays.
                forced = scale.clone()
        if steps:
            hold = self._guard == "raise" and (
                is_single_process() or self._ranks.losses_are_known
            )
            update_(
                self._policy,
                self._scaling(scale, state),
                state,
                steps,
                hold_on_bad_loss=hold,
                forced_scale=forced,
                kernels=self._kernels,
                rule_skip=rule_skip,
            )
        elif forced is not None:
            force_scale_(self._policy, self._scaling(scale, state), state, forced)
            self._monitor.scale_was_set = True
        elif not idle:
            raise messages.nothing_to_update()
        if idle:
            totals = [self._entries.totals_of(key) for key in idle]
            update_idle_(state, totals, whole=not steps)
        if self._buffers is not None:
            self._buffers.end_update(state.total.row[_SKIPPED])
        self._iteration.end(state.used_scale, self._entries)
        if (steps or idle) and type(scale) is Tensor and can_touch_host():
            self._monitor.end_update(self, state, self._iteration.settled)

    def _end_losses(self, steps: list[StepSummary]) -> Tensor | None:
        """Move the scales of several losses; return the skip that the rule observes."""
        opened = self._iteration.steps.values()
        channel = next((step.channel for step in opened if step.channel), None)
        return self._loss_scales.end_update(
            self._policy,
            [step.skip for step in steps],
            plain=self._iteration.losses > self._loss_scales.contexts,
            group=None if channel is None else channel.group,
        )

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook that gives a rank without data the scale of the others.

        For `torch.distributed.algorithms.join.Join([model, scaler])`.
        """
        from gradscale.torch.ranks.join import ScalerJoinHook

        return ScalerJoinHook(self, self.join_process_group)

    @property
    def join_device(self) -> torch.device:
        """The scaler's device, for `Join`."""
        return torch.device(self._device)

    @property
    def join_process_group(self) -> Any:
        """The ranks that join, for `Join`."""
        given = self._process_group
        return torch.distributed.group.WORLD if given is None else given

    def reset(self, optimizer: Any = None) -> None:
        """Discard the current iteration, without a step or a move of the scale.

        The gradients are left as they are; zero them before the next backward.

        Args:
            optimizer: Discard only the step of this one.
        """
        if not self._enabled:
            return
        if optimizer is None:
            self._iteration.abandon()
        else:
            self._iteration.forget(optimizer)
        if not self._iteration.steps and self._state is not None:
            self._state.fields.loss_trace.zero_()
            self._state.fields.loss.fill_(float("nan"))
        self._loss_scales.forget()
        self._monitor.meter.forget()
        self._monitor.module_hooks.forget()

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last `update()`; None before the first.

        Making it costs no sync; reading a field may. `last[optimizer]` is the outcome
        of one optimizer.
        """
        if not self._enabled:
            return self._disabled_steps.outcome()
        settled = self._iteration.settled
        if self._state is None or not settled:
            return None
        return outcome_of(self._state.total, self._entries.totals(), settled)

    @property
    def applied_steps(self) -> StepCount:
        """The number of applied steps; `applied_steps[optimizer]` for one. Syncs."""
        return self._count(0) if self._enabled else self._disabled_steps.applied()

    @property
    def skipped_steps(self) -> StepCount:
        """The number of skipped steps; `skipped_steps[optimizer]` for one. Syncs."""
        return self._count(1) if self._enabled else StepCount(0, {})

    def _count(self, place: int) -> StepCount:
        if self._state is None:
            return StepCount(self._resumed.total()[place], {})
        return count_of(self._state.total, self._entries.totals(), place)

    def postfix(self) -> str:
        """Return the scale and the skips for a progress bar. Syncs."""
        if not self._enabled:
            return postfix(1.0, 0, self.applied_steps)
        if self._state is None:
            total = self._resumed.total()
        else:
            total = self._state.total.applied_and_skipped()
        return postfix(self.get_scale(), total[1], sum(total))

    def diagnose(self, closure: Callable[[], Any]) -> Location:
        """Replay a failing batch and locate its first non-finite value.

        The scale is that of the last step, or `init_scale` before the first step. The
        model is not changed. Syncs.

        Args:
            closure: Runs the forward pass of the batch, under autocast if training
                does, and returns the loss before scaling.
        """
        state = self._state
        scale = self._init_scale if state is None else state.used_scale
        model = self._model
        if model is None:
            model = find_model(params_of(list(self._iteration.settled.values())))
        if model is None:
            raise messages.no_model()
        return diagnose(model, closure, scale)

    def write_bundle(
        self, folder: str | os.PathLike[str] = ".", *, batch: Any = None
    ) -> FilePath:
        """Write the evidence of the last steps into a new folder. Syncs.

        Facts of the last 50 steps, the last finding, the scaler's state and versions;
        its manifest lists the files. `guard="raise"` writes one before it raises.

        Args:
            folder: The parent of the new folder.
            batch: Also saved, by `torch.save`; the folder then contains your data.

        Returns:
            The new folder.
        """
        state, here = self.state_dict(), FilePath(folder)
        return self._monitor.write_bundle(here, state, batch)

    def close(self) -> None:
        """Judge the pending rows and close the run file, if there is one. Syncs.

        Called automatically at the end of the process.
        """
        self._monitor.close(self._state)

    @property
    def meter(self) -> Meter:
        """The underflow meter. It samples where there is a run file or a sink.

        `meter.watch_activations(model)` also samples the gradients of module outputs.
        """
        return self._monitor.meter

    def path(self, optimizer: Any) -> Path:
        """Return how the optimizer is stepped, and by which kernels.

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
        """Return the factor by which the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale backs off."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Return the number of consecutive finite steps before the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of consecutive finite steps before the scale grows."""
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
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
    _per_optimizer_states = property(
        lambda self: self._iteration.states,
        lambda self, states: self._iteration.replace_states(states),
    )
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

        It has torch's five keys, which `torch.amp.GradScaler` loads, and one more that
        torch ignores. Call it after `update()`.
        """
        return checkpoint.pack_scaler(self) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict()` of this class or of torch's.

        `gradscale.import_state` converts the states of other scalers to such a dict. An
        unusable state is refused and changes nothing. Does nothing if disabled.
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

    def _scaling(self, scale: Tensor, state: DeviceState) -> FixedState | ScaleState:
        """Return the tensors that hold the policy's state."""
        if isinstance(self._policy, DynamicScale):
            return ScaleState(scale, self._growth_tracker, state.debt)
        return FixedState(scale)

    def _open(self, optimizer: Any, funcname: str | None = None) -> OptimizerStep:
        """Return the step of an optimizer, made with its first call since an update.

        Args:
            optimizer: The optimizer.
            funcname: The method that needs the scale, for the error if there is none.
        """
        if funcname and (self._scale is None or self._growth_tracker is None):
            self._check_scale_growth_tracker(funcname)
        if funcname and self._loss_scales.in_block:
            raise messages.inside_loss_block(funcname)
        key = id(optimizer)
        step = self._iteration.steps.get(key)
        if step is not None and (step.entry is not None or self._state is None):
            return step
        source: Any = self._model
        if source is None and self._monitor.recorded:
            source = self._name_source(optimizer)
        step = self._iteration.open(optimizer, source)
        if not torch.compiler.is_compiling():
            step.entry = self._entries.of(optimizer)
            if self._iteration.strays and self._state is not None:
                written = self._iteration.adopt(step, self._state.used_scale)
                if written:
                    self._report_mixture(written, "older")
            if (self._iteration.first or self._monitor.loop.due) and can_touch_host():
                self._check_origin(step)
        if step.channel is None and self._state is not None and is_distributed():
            step.channel = self._channel(key, step.params())
        return step

    def _check_origin(self, step: OptimizerStep) -> None:
        """Check where the gradients come from, before anything reads them."""
        if self._iteration.first:
            self._check_foreign(step.params())
            if is_single_process():
                # With several ranks, gradients are reduced between backward and here.
                self._check_writes(step)
        if self._monitor.loop.due:
            self._monitor.loop.before_read(step)

    def _name_source(self, optimizer: Any) -> Any:
        """Return a reference to the model; search for it if names are recorded."""
        if torch.compiler.is_compiling():
            return None
        return self._monitor.model_lookup.of_optimizer(optimizer)

    def _channel(self, key: int, params: list[Tensor]) -> RankChannel | None:
        """Return the channel to other ranks; None where this one decides alone."""
        scale, state = self._required("step")
        settings, position = (self._policy, self._guard), self._entries.position(key)
        return self._ranks.channel(key, params, state, scale, settings, position)

    def _report_mixture(self, params: list[Tensor], why: messages.Mixture) -> None:
        steps = self._iteration.steps.values()
        model: Any = self._model
        if model is None:
            model = self._monitor.model_lookup.of_params(params)
        sources = [model, *(step.optimizer for step in steps)]
        names = names_of(params, sources)
        if why != "foreign":
            self._monitor.report_late_backward()
        self._warn.mixture(names, why, self._guard == "raise")
