"""The base class of the optimizers: one pass over each batch of parameters."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from gradscale.errors import check_choice
from gradscale.torch.devices import to_device
from gradscale.torch.kernels import Kernels
from gradscale.torch.kernels.args import AdamLists, AmpArgs, MomentumLists
from gradscale.torch.optim.batches import Batch, Batches, BatchStep
from gradscale.torch.optim.settings import check_differentiable
from gradscale.torch.optim.state import Loaded, adopt_loaded
from gradscale.torch.tensor_list import GradSnapshot


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer that unscales, skips and steps in one pass over its tensors.

    A scaler sets `grad_scale` and `found_inf` on it for the duration of a step, as on
    torch's fused optimizers; both stay on the device. It may also set `grad_snapshot`,
    the gradients that it has just collected, all of one kind: they are then not
    collected again, unless a hook ran before the step.

    Attributes:
        write_back: Write the unscaled gradients into `.grad`.
        kernels: "auto", "plain" or "triton".
        check_data: Keep writes through `.data` to half-precision parameters.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        write_back: bool,
        kernels: Kernels,
        check_data: bool = False,
    ) -> None:
        check_choice("kernels", kernels, ("auto", "plain", "triton"))
        self.write_back = write_back
        self.kernels = kernels
        self.check_data = check_data
        self._batches = Batches()
        # Not torch's own constructors: they read an lr on a device, and refuse
        # combinations of `foreach`, `fused` and `capturable` that are equal here.
        torch.optim.Optimizer.__init__(self, params, defaults)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the entries in the state of each parameter."""
        raise NotImplementedError

    def first_count(self, state: dict[str, Any]) -> float:
        """Return the step count for a parameter's state that has none."""
        return 0.0

    def lists(self, batch: Batch, grads: Sequence[Tensor]) -> AdamLists | MomentumLists:
        """Return the tensors of one pass."""
        raise NotImplementedError

    def update_(self, step: BatchStep, amp: AmpArgs) -> None:
        """Run one pass."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch: overloads
        """Take one step, or none if `found_inf` is set. No host sync.

        Args:
            closure: Computes the gradients again and returns the loss.

        Returns:
            The result of the closure.
        """
        loss, snapshot = None, self._lent_snapshot()
        if closure is not None:
            snapshot = None
            with torch.enable_grad():
                loss = closure()
        amp: dict[torch.device, AmpArgs] = {}
        for step in self._batches.steps(self, snapshot):
            batch = step.batch
            if batch.device not in amp:
                amp[batch.device] = self._amp_args(batch.device)
            batch.update_masters_(step.layout, self, self.check_data)
            self.update_(step, amp[batch.device])
            batch.note_own_write()
        return loss

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step as torch does; without hooks and profiler, call it directly.

        Torch opens a profiler range in every step, which takes as long as a launch.
        """
        profiled = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            taken = profiled if _is_observed(self) else func
            return taken(self, *args, **kwargs)

        return step

    def _lent_snapshot(self) -> GradSnapshot | None:
        """Return the gradients collected by a scaler, unless a hook may change them."""
        hooks = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        return None if hooks else self.__dict__.get("grad_snapshot")

    def _amp_args(self, device: torch.device) -> AmpArgs:
        return AmpArgs(
            _scalar_on(getattr(self, "grad_scale", None), device),
            _scalar_on(getattr(self, "found_inf", None), device),
            self.write_back,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own settings."""
        if isinstance(param_group, dict):
            default = self.defaults.get("differentiable")
            check_differentiable(param_group.get("differentiable", default))
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`, also of torch's optimizer of the same name.

        Moments and masters are converted to their wide dtype and moved to the device
        of their parameter. The next step makes missing masters from the parameters.
        """
        # Registered last: it gets the result of the user's hooks.
        handle = self.register_load_state_dict_pre_hook(_wrap)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        names = ("write_back", "kernels", "check_data")
        kept = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "state" in state:
            adopt_loaded(state["state"])
        super().__setstate__(state)
        # A pickle from before this option.
        self.__dict__.setdefault("check_data", False)
        self._batches = Batches()


def _is_observed(optimizer: Any) -> bool:
    """Return whether a hook, a profiler or torch.compile must see the step."""
    return bool(
        torch.compiler.is_compiling()
        or torch.autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def _scalar_on(value: Tensor | None, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    if value.dim() or value.dtype is not torch.float32:
        value = value.reshape(()).float()
    return value if value.device == device else to_device(value, device)


def _wrap(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {
        key: Loaded(state) if isinstance(state, dict) else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
