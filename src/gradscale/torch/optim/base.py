"""What the optimizers have in common: batches in, one pass over each."""

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
from gradscale.torch.devices import moved
from gradscale.torch.kernels import Kernels
from gradscale.torch.kernels.args import Handed
from gradscale.torch.optim.batch import Batch
from gradscale.torch.optim.batches import Batches
from gradscale.torch.optim.settings import check_differentiable
from gradscale.torch.optim.state import Loaded, adopt_loaded
from gradscale.torch.tensor_list import GradSnapshot


class OnePass(torch.optim.Optimizer):
    """An optimizer that unscales, skips and steps in one pass over its tensors.

    A scaler lends it `grad_scale` and `found_inf` for a step, as it does to torch's
    fused optimizers. Both stay on the device.

    Attributes:
        write_back: Write the unscaled gradients into `.grad`.
        kernels: "auto", "plain" or "triton".
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, params: Any, defaults: dict[str, Any], write_back: bool, kernels: Kernels
    ) -> None:
        check_choice("kernels", kernels, ("auto", "plain", "triton"))
        self.write_back = write_back
        self.kernels = kernels
        self._batches = Batches()
        # Torch's own constructors read an lr that lies on a device, and refuse
        # combinations of passes that are all the same one here.
        torch.optim.Optimizer.__init__(self, params, defaults)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of what the state of a parameter must have."""
        raise NotImplementedError

    def first_count(self, state: dict[str, Any]) -> float:
        """Return how many steps the state of a parameter without a count stands for."""
        return 0.0

    def run(
        self,
        group: dict[str, Any],
        batch: Batch,
        grads: Sequence[Tensor],
        handed: Handed,
    ) -> None:
        """Run one pass."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch: overloads
        """Take one step, or none if the scaler has found something. No host sync.

        Args:
            closure: Computes the gradients anew and returns the loss.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lent: dict[torch.device, tuple[Tensor | None, Tensor | None]] = {}
        for group, batch, grads, grads_at in self._batches.walk(self, self._seen()):
            if batch.device not in lent:
                lent[batch.device] = self._lent_on(batch.device)
            handed = Handed(*lent[batch.device], self.write_back, grads_at)
            batch.take_over_()
            self.run(group, batch, grads, handed)
            batch.note_own_write()
        return loss

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step as torch does; where nobody listens, only the step runs.

        Torch announces every step to the profiler, which takes as long as a launch.
        """
        announced = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            taken = announced if _has_listeners(self) else func
            return taken(self, *args, **kwargs)

        return step

    def _seen(self) -> GradSnapshot | None:
        """Return the gradients that a scaler has lent, if nobody came in between."""
        hooks = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        return None if hooks else self.__dict__.get("grad_snapshot")

    def _lent_on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        return (
            _scalar_on(getattr(self, "grad_scale", None), device),
            _scalar_on(getattr(self, "found_inf", None), device),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own."""
        if isinstance(param_group, dict):
            default = self.defaults.get("differentiable")
            check_differentiable(param_group.get("differentiable", default))
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or of the optimizer in torch.

        Moments and masters keep or get their wide dtype, and move to the device of
        their parameter. A master that is not there is made from the parameter in the
        next step.
        """
        # The last one, so that it sees what the user's own hooks have made of it.
        handle = self.register_load_state_dict_pre_hook(_wrap)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"write_back": self.write_back, "kernels": self.kernels}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "state" in state:
            adopt_loaded(state["state"])
        super().__setstate__(state)
        self._batches = Batches()


def _has_listeners(optimizer: Any) -> bool:
    """Return whether a hook or a profiler is to hear of a step."""
    return bool(
        torch.compiler.is_compiling()
        or torch.autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def _scalar_on(lent: Tensor | None, device: torch.device) -> Tensor | None:
    if lent is None:
        return None
    if lent.dim() or lent.dtype is not torch.float32:
        lent = lent.reshape(()).float()
    return lent if lent.device == device else moved(lent, device)


def _wrap(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {
        key: Loaded(state) if isinstance(state, dict) else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
