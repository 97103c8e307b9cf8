"""LARC: a learning rate for each parameter, from the norms of weight and gradient."""

from typing import Any

import torch


class LARC:
    """Wraps an optimizer; scales each gradient relative to the norm of its weight.

    The local rate of a parameter is `trust_coefficient * |w| / (|g| + decay * |w| +
    eps)`, and its gradient is multiplied by it. See https://arxiv.org/abs/1708.03888.

    >>> weight = torch.nn.Parameter(torch.full((2,), 3.0))
    >>> optimizer = LARC(torch.optim.SGD([weight], lr=1.0), trust_coefficient=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()
    [2.0, 2.0]

    Args:
        optimizer: Any of torch's.
        trust_coefficient: The size of a step relative to the weight.
        clip: True for `min(local rate, lr)`, False for their product.
        eps: Keeps the rate finite.

    Attributes:
        optim: The optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def state(self) -> Any:
        """The state of the optimizer."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optim.add_param_group(param_group)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Scale the gradients in place, and step.

        The weight decay of a group is added here, before the rate, and not by the
        optimizer.
        """
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
                self._scale_grads(group, decay)
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    @torch.no_grad()
    def _scale_grads(self, group: dict[str, Any], decay: float) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            weight, grad = param.norm(), param.grad.norm()
            rate = self.trust_coefficient * weight / (grad + weight * decay + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            # Without a sync: a gradient is unchanged if it or its weight is all zeros.
            usable = (weight != 0) & (grad != 0)
            scaled = (param.grad + decay * param) * rate
            param.grad.copy_(torch.where(usable, scaled, param.grad))
