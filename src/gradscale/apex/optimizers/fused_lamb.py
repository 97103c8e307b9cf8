"""FusedLAMB by torch's multi-tensor operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import AmpError

MOMENTS = {"exp_avg", "exp_avg_sq"}


class FusedLAMB(torch.optim.Optimizer):
    """LAMB: Adam whose step is scaled to the norm of each weight. No host sync.

    See https://arxiv.org/abs/1904.00962. Arithmetic and state are f32 for
    half-precision parameters, which are rounded after each step: use O2 for masters.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedLAMB([weight], lr=0.5, weight_decay=0.0)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])

    Args:
        params, lr, betas, eps, weight_decay: As in torch's AdamW.
        bias_correction: Correct the moments for their start at 0.
        amsgrad: Refused if True, as in apex.
        adam_w_mode: Decoupled weight decay.
        grad_averaging: Weigh a gradient in the first moment by `1 - beta1`.
        set_grad_none: `zero_grad` removes gradients instead of filling them with 0.
        max_grad_norm: Gradients are clipped to this joint norm; 0 for no clip.
        use_nvlamb: Scale the step of parameters without weight decay too.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise AmpError(
                "amsgrad=True was given. LAMB has no such variant. Leave it out.",
                code="GS101",
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch: overloads
        """Take one step.

        Args:
            closure: Computes the gradients again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [
            param.grad.float()
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if not grads:
            return loss
        norm = torch.nn.utils.get_total_norm(grads)
        for group in self.param_groups:
            self._step_group(group, norm)
        return loss

    def _step_group(self, group: dict[str, Any], norm: Tensor) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        group["step"] = group.get("step", 0) + 1
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        most = group["max_grad_norm"]
        clip = (norm / most).clamp(min=1.0) if most > 0 else torch.ones_like(norm)
        grads = [param.grad.float() / clip.to(param.device) for param in params]
        weights = [param.float() for param in params]
        if decay and not self.adam_w_mode:
            torch._foreach_add_(grads, weights, alpha=decay)
        means = [self._moment(param, "exp_avg") for param in params]
        squares = [self._moment(param, "exp_avg_sq") for param in params]
        torch._foreach_mul_(means, beta1)
        share = 1.0 - beta1 if group["grad_averaging"] else 1.0
        torch._foreach_add_(means, grads, alpha=share)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        first = second = 1.0
        if group["bias_correction"]:
            first = 1.0 - beta1 ** group["step"]
            second = 1.0 - beta2 ** group["step"]
        updates = torch._foreach_div(means, first)
        below = torch._foreach_sqrt(torch._foreach_div(squares, second))
        torch._foreach_add_(below, group["eps"])
        torch._foreach_div_(updates, below)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, weights, alpha=decay)
        for param, weight, update in zip(params, weights, updates, strict=True):
            ratio = torch.ones_like(norm)
            if self.use_nvlamb or decay:
                size, length = weight.norm(), update.norm()
                usable = (size > 0) & (length > 0)
                ratio = torch.where(usable, size / length, 1.0)
            param.copy_(weight - group["lr"] * ratio.to(param.device) * update)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`; moments stay f32.

        Torch casts them to the dtype of their parameter, which would round them.
        """
        super().load_state_dict(state_dict)
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        for group, saved in groups:
            for param, key in zip(group["params"], saved["params"], strict=True):
                state = state_dict["state"].get(key, {})
                for name in MOMENTS & state.keys():
                    wide = state[name].to(param.device, torch.float32)
                    self.state[param][name] = wide

    def _moment(self, param: Tensor, name: str) -> Tensor:
        state = self.state[param]
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=torch.float32)
        return state[name]
