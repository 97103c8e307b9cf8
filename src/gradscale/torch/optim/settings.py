"""Validates the settings of an optimizer, and converts them in each step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import ConfigError
from gradscale.torch.devices import to_device


def check_lr(lr: Any) -> None:
    """Refuse an invalid learning rate; one on a device is not read."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigError(
                f"lr is a tensor of {lr.numel()} elements. A parameter group has one "
                "learning rate. Pass a tensor of one element, or give "
                "each parameter group its own lr.",
                code="GS101",
                replaces="Tensor lr must be 1-element",
            )
        if lr.device.type != "cpu":
            return
    _check(lr >= 0.0, "lr", lr, "0 or more", f"Invalid learning rate: {lr}")


def check_betas(betas: Sequence[Any]) -> None:
    """Refuse invalid decay rates of the moments."""
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
    """Refuse an invalid eps, the term added to the denominator."""
    _check(eps >= 0.0, "eps", eps, "0 or more", f"Invalid epsilon value: {eps}")


def check_weight_decay(weight_decay: Any) -> None:
    """Refuse an invalid weight decay."""
    number("weight_decay", weight_decay)
    _check(
        weight_decay >= 0.0,
        "weight_decay",
        weight_decay,
        "0 or more",
        f"Invalid weight_decay value: {weight_decay}",
    )


def check_momentum(momentum: Any, dampening: Any, nesterov: bool) -> None:
    """Refuse an invalid momentum, or one that nesterov cannot use."""
    _check(
        momentum >= 0.0,
        "momentum",
        momentum,
        "0 or more",
        f"Invalid momentum value: {momentum}",
    )
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ConfigError(
            f"nesterov=True was passed with momentum={momentum} and dampening="
            f"{dampening}. Nesterov momentum is defined without dampening. Pass a "
            "momentum above 0 and no dampening.",
            code="GS101",
            replaces="Nesterov momentum requires a momentum and zero dampening",
        )


def check_differentiable(differentiable: Any) -> None:
    """Refuse differentiable=True."""
    if differentiable:
        raise ConfigError(
            "differentiable=True was passed. These optimizers write all results in "
            "place in one pass, which autograd cannot differentiate. Omit it, or use "
            "the optimizer of the same name in torch.optim.",
            code="GS101",
        )


def number(name: str, value: Any) -> float:
    """Return a setting as a float; refuse a tensor on a device, without reading it."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ConfigError(
            f"{name} is a tensor on {value.device}. Reading it would make the host "
            "wait for the device in every step. Pass a number; only lr may be on a "
            "device.",
            code="GS101",
        )
    return float(value)


def rate_on(lr: Any, device: torch.device, wide: torch.dtype) -> float | Tensor:
    """Return the learning rate in the form that a pass takes.

    Args:
        lr: A number or a tensor of one element.
        device: The device of the parameters.
        wide: The dtype of the arithmetic.

    Returns:
        A float if `lr` can be read without a sync, else a scalar on the device.
    """
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return to_device(lr.detach().reshape(()).to(wide), device)
    return float(lr)


def _check(holds: Any, name: str, value: Any, must: str, torch_says: str) -> None:
    if not holds:
        raise ConfigError(
            f"{name}={value} was passed. It must be {must}, or the optimizer diverges "
            "or computes values that are not finite. Change it, or omit it for the "
            "default.",
            code="GS101",
            replaces=torch_says,
        )
