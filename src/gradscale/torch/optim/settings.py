"""The settings of an optimizer: refused when they are given, read in every step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import ConfigError
from gradscale.torch.devices import moved


def check_lr(lr: Any) -> None:
    """Refuse a learning rate; one that lies on a device is not read."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigError(
                f"lr is a tensor of {lr.numel()} elements. One learning rate serves "
                "all parameters of a group. Pass a tensor of one element, or give "
                "each parameter group its own lr.",
                code="GS101",
                replaces="Tensor lr must be 1-element",
            )
        if lr.device.type != "cpu":
            return
    _check(lr >= 0.0, "lr", lr, "0 or more", f"Invalid learning rate: {lr}")


def check_betas(betas: Sequence[Any]) -> None:
    """Refuse decay rates of the moments."""
    for i, beta in enumerate(betas):
        number(f"betas[{i}]", beta)
        _check(
            0.0 <= beta < 1.0,
            f"betas[{i}]",
            beta,
            "at least 0 and less than 1",
            f"Invalid beta parameter at index {i}: {beta}",
        )


def check_eps(eps: Any) -> None:
    """Refuse a term that is added to the denominator."""
    _check(eps >= 0.0, "eps", eps, "0 or more", f"Invalid epsilon value: {eps}")


def check_weight_decay(weight_decay: Any) -> None:
    """Refuse a weight decay."""
    number("weight_decay", weight_decay)
    _check(
        weight_decay >= 0.0,
        "weight_decay",
        weight_decay,
        "0 or more",
        f"Invalid weight_decay value: {weight_decay}",
    )


def check_momentum(momentum: Any, dampening: Any, nesterov: bool) -> None:
    """Refuse a momentum, alone or together with what goes with it."""
    _check(
        momentum >= 0.0,
        "momentum",
        momentum,
        "0 or more",
        f"Invalid momentum value: {momentum}",
    )
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ConfigError(
            f"nesterov=True was given with momentum={momentum} and dampening="
            f"{dampening}. It looks ahead along an undampened momentum. Pass a "
            "momentum above 0 and leave dampening out.",
            code="GS101",
            replaces="Nesterov momentum requires a momentum and zero dampening",
        )


def check_differentiable(differentiable: Any) -> None:
    """Refuse to be differentiated through."""
    if differentiable:
        raise ConfigError(
            "differentiable=True was given. These optimizers write all results in "
            "place in one pass, and autograd cannot go back through it. Leave it out, "
            "or use the optimizer of the same name in torch.optim.",
            code="GS101",
        )


def number(name: str, value: Any) -> float:
    """Return a setting as a number; a tensor on a device is refused, not read."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ConfigError(
            f"{name} is a tensor on {value.device}. Reading it would make the host "
            "wait for the device in every step. Pass a number; only lr may lie on a "
            "device.",
            code="GS101",
        )
    return float(value)


def rate_on(lr: Any, device: torch.device, wide: torch.dtype) -> float | Tensor:
    """Return the learning rate as one pass takes it.

    Args:
        lr: A number or a tensor of one element.
        device: Where the parameters are.
        wide: The dtype of the arithmetic.

    Returns:
        A number if `lr` can be read without waiting, else a scalar on the device.
    """
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return moved(lr.detach().reshape(()).to(wide), device)
    return float(lr)


def _check(holds: Any, name: str, value: Any, must: str, torch_says: str) -> None:
    if not holds:
        raise ConfigError(
            f"{name}={value} was given. It must be {must}, or the steps would lead "
            "away from the minimum or to values that are not finite. Change it, or "
            "leave it out for the default.",
            code="GS101",
            replaces=torch_says,
        )
