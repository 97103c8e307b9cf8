"""An optimizer under amp: f32 masters in its groups, gradients of several losses.

The optimizer is changed in place, as in apex: scripts keep several references to it.
Its groups hold the stepped tensors, so that clipping and LARC see unscaled f32
gradients.
"""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.apex.amp._amp_state import _amp_state
from gradscale.apex.amp.casts import disable_casts
from gradscale.apex.amp.scaler import LossScaler, to_host
from gradscale.errors import AmpError, OrderError
from gradscale.torch import messages
from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.stats import GradStats, read
from gradscale.torch.grads.unscale import multiply_
from gradscale.torch.names import names_of
from gradscale.torch.optim.base import FusedOptimizer
from gradscale.torch.optim.masters import DataCheck, LastWrite, Masters
from gradscale.torch.optim.state import MASTER, WIDE, needs_master
from gradscale.torch.precision.losses import Stash, stash_grads


class Unscaled:
    """The gradients of one backward pass, read before they were unscaled.

    Attributes:
        scaler: The scale of the loss.
        loss: f32[], the loss before it was scaled; None if it is not one number.
        stats: For each optimizer, statistics of its gradients, and f32[], the factor
            that multiplies them in their own dtype.
        inv_scale: f32[], the inverse of the scale.
    """

    def __init__(self, scaler: LossScaler, loss: Tensor) -> None:
        self.scaler = scaler
        self.loss = loss.detach().reshape(()) if loss.numel() == 1 else None
        self.stats: list[tuple[GradStats, Tensor]] = []
        scale = scaler.loss_scale()
        # A scale without a floor may have reached 0.
        inverse = 1.0 / scale if scale else math.inf
        self.inv_scale = torch.tensor(inverse, device=loss.device)
        self._skips: bool | None = None
        self._own_checks = scaler.own_checks

    def settle(self, sources: Sequence[Any]) -> bool:
        """Read the flags, move the scale; return whether to skip. Syncs once.

        A second call returns the same: several optimizers may wait for one pass. False
        without a read if the script has checked the gradients itself since.

        Args:
            sources: Where the names of culprits are looked up.
        """
        if self._skips is not None:
            return self._skips
        if self._own_checks != self.scaler.own_checks:
            return False
        home = self.inv_scale.device
        values = [self.inv_scale if self.loss is None else self.loss]
        for stats, factor in self.stats:
            values += [stats.nonfinite(factor.to(stats.home)), stats.amax()]
        loss, *pairs = to_host(values, home)
        scaler = self.scaler
        scaler._has_overflow = any(pairs[::2])
        self._skips = scaler.record_pass(
            read=bool(self.stats),
            amax=max(pairs[1::2], default=0.0, key=_nan_last),
            loss=None if self.loss is None else loss,
            culprits=lambda: [
                name
                for stats, factor in self.stats
                for name in names_of(stats.culprits(factor), sources)
            ],
        )
        _amp_state.last = scaler.last
        return self._skips


class AmpOptimizer:
    """The state of amp for one optimizer, stored as its attribute `_amp_stash`.

    Attributes:
        master_of: The f32 master of each half-precision parameter.
        skips: The losses that overflowed since the last step, by `loss_id`.
        delayed: Passes whose check was left to the step, with their `loss_id`.
        in_pass: The block of a pass is running.
        window: The gradients before a pass whose unscaling is delayed, and its scale;
            None if the gradients are unscaled.
    """

    def __init__(self, optimizer: Any, *, masters: bool) -> None:
        self.optimizer = optimizer
        self.keeps_masters = masters
        self.master_of: dict[Tensor, Tensor] = {}
        self.skips: list[int] = []
        self.delayed: list[tuple[int, Unscaled]] = []
        self.in_pass = False
        self.window: tuple[Stash, float] | None = None
        self._masters: Masters | None = None
        self._check = DataCheck()
        # A pass has begun, or its absence was reported.
        self._knows_passes = False
        # Apex makes masters in the first pass. Set by scripts that restore them before.
        self.lazy_init_called = True

    # Apex's names, for third-party code that reads them.
    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The half-precision parameters that have masters."""
        return list(self.master_of)

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters, in the same order."""
        return list(self.master_of.values())

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half-precision parameters by group; only with masters, as in apex."""
        return [[param for param, _ in group] for group in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters by group; only with masters."""
        return [[master for _, master in group] for group in self._groups()]

    def _groups(self) -> list[list[tuple[Tensor, Tensor]]]:
        if not self.keeps_masters:
            # Public code asks by `hasattr`.
            raise AttributeError(f"{type(self.optimizer).__name__} has no masters")
        param_of = {id(master): param for param, master in self.master_of.items()}
        return [
            [(param_of[id(p)], p) for p in group["params"] if id(p) in param_of]
            for group in self.optimizer.param_groups
        ]

    @property
    def already_patched(self) -> bool:
        """The next step will be skipped."""
        return bool(self.skips)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """The gradients of a pass wait to be unscaled."""
        return self.window is not None

    def params(self) -> list[Tensor]:
        """Return the model's parameters, in the order of the groups."""
        param_of = {id(master): param for param, master in self.master_of.items()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [param_of.get(id(p), p) for p in held]

    def make_masters(self, values: dict[Tensor, Tensor] | None = None) -> None:
        """Replace trained half-precision parameters in the groups by masters.

        Args:
            values: For parameters that were rounded, their value before.
        """
        if not self.keeps_masters:
            return
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if not param.requires_grad or not needs_master(param):
                    continue
                value = (values or {}).get(param)
                if value is None:
                    value = param.detach().to(WIDE[param.dtype])
                master = torch.nn.Parameter(value)
                self.master_of[param] = group["params"][i] = master
                self._masters = None
                if param in state:
                    state[master] = state.pop(param)

    # --- one backward pass ------------------------------------------------------------

    def begin_pass(self, scale: float) -> None:
        """Set the gradients aside, so that the pass creates new ones.

        Those of a pass whose unscaling was delayed stay, rescaled to the new scale.
        """
        self._knows_passes = self.in_pass = True
        if self.window is not None:
            stash, before = self.window
            if before != scale:
                grads = [p.grad for p in stash.params if p.grad is not None]
                factor = torch.tensor(scale / before, device="cpu")
                multiply_(grads, factor)
            self.window = stash, scale
            return
        # For parameters that have been unfrozen since.
        self.make_masters()
        params = self.params()
        stash = stash_grads(params)
        for i, param in enumerate(params):
            if param in self.master_of:
                # Their gradients are already part of those of the masters.
                stash.grads[i] = None
        self.window = stash, scale

    def abandon_pass(self) -> None:
        """Restore the gradients after an error."""
        if self.window is not None:
            self.window[0].put_back()
            self.window = None

    @torch.no_grad()
    def end_pass(self, unscaled: Unscaled) -> None:
        """Unscale the new gradients and add those that were put aside. No sync."""
        if self.window is None:
            raise OrderError(
                f"A scale_loss() block of {type(self.optimizer).__name__} ended inside "
                "another one of the same optimizer. The gradients of both losses were "
                "unscaled by the scale of the inner one. Put the backward passes into "
                "one block after the other.",
                code="GS102",
            )
        stash, self.window = self.window[0], None
        made = [param for param in stash.params if param.grad is not None]
        snapshot = collect(made, allow_fp16=True, names=(*_amp_state.models,))
        if snapshot.tensors:
            # With masters, gradients are unscaled in f32, where no product overflows.
            one = torch.ones_like(unscaled.inv_scale)
            factor = one if self.master_of else unscaled.inv_scale
            unscaled.stats.append((read(snapshot, snapshot.tensors[0].device), factor))
        halves = [param for param in made if param in self.master_of]
        wide = [self._wide(param) for param in halves]
        own = {
            id(grad): grad
            for param, grad in zip(
                snapshot.params, snapshot.originals or snapshot.tensors, strict=True
            )
            if param not in self.master_of
        }
        multiply_([*wide, *own.values()], unscaled.inv_scale)
        for param, grad in zip(halves, wide, strict=True):
            master = self.master_of[param]
            if master.grad is None:
                master.grad = grad
            else:
                master.grad.add_(grad)
        stash.add_to_new()

    def _wide(self, param: Tensor) -> Tensor:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            grad = grad.to_dense()
        return grad.to(WIDE[param.dtype], copy=True)

    # --- the methods of the optimizer -------------------------------------------------

    def step(self, old_step: Callable[..., Any], closure: Any = None) -> Any:
        """Step the masters and round them into the parameters; or skip."""
        if closure is not None:
            self._check_closure()
        if self.window is not None:
            if not _amp_state.exact:
                raise OrderError(
                    f"{type(self.optimizer).__name__}.step() was called after "
                    "scale_loss(..., delay_unscale=True). The gradients are still "
                    "multiplied by the scale. Leave delay_unscale out in the last "
                    "backward pass before the step.",
                    code="GS102",
                )
            self.window = None
        delayed, self.delayed = self.delayed, []
        for loss_id, unscaled in delayed:
            if unscaled.settle(_amp_state.models):
                self.skips.append(loss_id)
        if self.skips:
            return self._skip()
        self._check_gradients()
        with disable_casts(), torch.no_grad():
            self._keep_writes()
        with disable_casts():
            returned = old_step() if closure is None else old_step(closure)
        with disable_casts():
            self.write_params()
        for master in self.master_of.values():
            master.grad = None
        return returned

    def _skip(self) -> None:
        skips, self.skips = self.skips, []
        for loss_id in dict.fromkeys(skips):
            scale = _amp_state.loss_scalers[loss_id].loss_scale()
            _amp_state.print(
                f"step skipped: the gradients of loss {loss_id} were not finite; its "
                f"scale is now {scale:g}"
            )
        messages.mark_called(self.optimizer)
        for master in self.master_of.values():
            master.grad = None

    def _check_closure(self) -> None:
        if self.keeps_masters or self.skips or self.delayed:
            raise AmpError(
                f"{type(self.optimizer).__name__}.step() was given a closure. It would "
                "be evaluated inside the step, after the gradients were unscaled and "
                "checked, and its own would be neither. Use opt_level='O1' without "
                "scale_loss, or gradscale.torch.step_with_closure.",
                code="GS108",
            )

    def _check_gradients(self) -> None:
        """Warn once if the model has gradients and `scale_loss` was never used."""
        if self._knows_passes:
            return
        masters = self.master_of.values()
        if any(param.grad is not None for param in self.master_of) and all(
            master.grad is None for master in masters
        ):
            self._knows_passes = True
            _amp_state.warn(
                f"{type(self.optimizer).__name__}.step() was called after a backward "
                "pass without scale_loss(). The float32 masters get their gradients at "
                "its end, so this step changes no half-precision weight. Write `with "
                "amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`. Reported once for each optimizer.",
                code="GS103",
            )

    def _keep_writes(self) -> None:
        """Copy external writes to the parameters into their masters."""
        if self.master_of:
            self._all_masters().update_(
                None, list(_amp_state.models), check_data=_amp_state.check_data
            )

    @torch.no_grad()
    def write_params(self) -> None:
        """Round the masters into their parameters."""
        if self.master_of:
            masters = self._all_masters()
            torch._foreach_copy_(masters.params, masters.masters)
            masters.note_own_write()

    def _all_masters(self) -> Masters:
        if self._masters is None:
            owners = list(self.master_of)
            self._masters = Masters(
                owners,
                owners,
                list(self.master_of.values()),
                [LastWrite()] * len(owners),
                self._check,
            )
        return self._masters

    def zero_grad(self, old_zero: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Clear the gradients of the model and those of the masters."""
        if self.in_pass and self.window is not None:
            # Inside the block: there is nothing to add to its gradients.
            stash, scale = self.window
            self.window = stash._replace(grads=[None] * len(stash.grads)), scale
        else:
            self.window = None
        self.skips, self.delayed = [], []
        for param in self.master_of:
            param.grad = None
        for master in self.master_of.values():
            master.grad = None
        return old_zero(*args, **kwargs)

    def add_param_group(self, old_add: Callable[..., Any], group: Any) -> None:
        """Add a group; its half-precision parameters get masters."""
        old_add(group)
        self.make_masters()

    # --- checkpoints ------------------------------------------------------------------

    def _masters_by_key(self, groups: Sequence[dict[str, Any]]) -> dict[Any, Tensor]:
        """Return the master behind each key of a state dict."""
        held = set(map(id, self.master_of.values()))
        return {
            key: master
            for saved, group in zip(groups, self.optimizer.param_groups, strict=False)
            for key, master in zip(saved["params"], group["params"], strict=False)
            if id(master) in held
        }

    def save(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the masters to a state dict, unrounded, unlike apex."""
        states = dict(state_dict["state"])
        for key, master in self._masters_by_key(state_dict["param_groups"]).items():
            states[key] = {**states.get(key, {}), MASTER: master.detach()}
        return {**state_dict, "state": states}

    def load(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the masters out of a state dict.

        A missing master is created from its parameter.
        """
        found = self._masters_by_key(state_dict["param_groups"])
        param_of = {id(master): param for param, master in self.master_of.items()}
        states: dict[Any, Any] = {}
        # Gradscale's own optimizers keep masters in their state.
        kept = isinstance(self.optimizer, FusedOptimizer)
        for key, state in state_dict["state"].items():
            drop = key in found or not kept
            states[key] = {n: v for n, v in state.items() if n != MASTER or not drop}
        with torch.no_grad():
            for key, master in found.items():
                saved = state_dict["state"].get(key, {}).get(MASTER)
                master.copy_(param_of[id(master)] if saved is None else saved)
        return {**state_dict, "state": {k: s for k, s in states.items() if s}}


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value


def process_optimizer(
    optimizer: Any, *, masters: bool, values: dict[Tensor, Tensor]
) -> None:
    """Change an optimizer in place.

    Args:
        optimizer: Any of torch's kind, or LARC around one.
        masters: It steps f32 masters of half-precision parameters.
        values: For parameters that were rounded, their value before.
    """
    amp = AmpOptimizer(optimizer, masters=masters)
    amp.make_masters(values)
    optimizer._amp_stash = amp
    bare = with_hooks(optimizer)
    if bare is not None:
        if masters:
            bare.register_state_dict_post_hook(amp.save)
        bare.register_load_state_dict_pre_hook(amp.load)
    # Apex's names, for scripts that restore masters or write to them.
    optimizer._lazy_init_maybe_master_weights = amp.make_masters
    optimizer._amp_lazy_init = amp.make_masters
    optimizer._master_params_to_model_params = amp.write_params
    for name in ("step", "zero_grad", "add_param_group"):
        old, ours = getattr(optimizer, name), getattr(amp, name)
        setattr(optimizer, name, _method(optimizer, old, ours))


def with_hooks(optimizer: Any) -> Any:
    """Return the optimizer that has torch's hooks for checkpoints, or None.

    A wrapper such as LARC or Lookahead may not have called `Optimizer.__init__`.
    """
    inner = (getattr(optimizer, name, None) for name in ("optim", "optimizer"))
    for one in (optimizer, *inner):
        if "_optimizer_state_dict_post_hooks" in getattr(one, "__dict__", ()):
            return one
    return None


def _method(optimizer: Any, old: Callable[..., Any], ours: Callable[..., Any]) -> Any:
    # A bound method: LR schedulers read its `__func__`.
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(old, *args, **kwargs)

    if hasattr(old, "_wrapped_by_lr_sched"):
        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return types.MethodType(method, optimizer)


def stash_of(optimizer: Any) -> AmpOptimizer:
    """Return the state of amp for an optimizer.

    Raises:
        AmpError: It was not given to `initialize`.
    """
    amp = getattr(optimizer, "_amp_stash", None)
    if amp is None:
        raise AmpError(
            f"{type(optimizer).__name__} was not given to amp.initialize(). Its "
            "gradients could not be unscaled. Pass it to amp.initialize() together "
            "with its model, and use what it returns.",
            code="GS101",
        )
    return amp
