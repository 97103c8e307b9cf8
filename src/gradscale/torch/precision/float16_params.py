"""Detects float16 parameters that are trained without float32 masters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import ConfigError
from gradscale.torch.messages import WarnOnce, float16_remedy
from gradscale.torch.names import names_of
from gradscale.torch.optim.base import FusedOptimizer
from gradscale.torch.precision.master_weights import MasterWeights
from gradscale.torch.step.dispatch import StepMode
from gradscale.torch.step.optimizer_step import OptimizerStep

MOST_NAMES = 5


class Float16Check:
    """Reports the float16 parameters that are trained without masters.

    Args:
        allowed: The user accepts them.
        refuses_eps: If so, refuse an `eps` that is 0 in float16.
        as_error: Raise instead of warning.
        warn: The warnings of the scaler.
    """

    def __init__(
        self, *, allowed: bool, refuses_eps: bool, as_error: bool, warn: WarnOnce
    ) -> None:
        self._allowed, self._refuses_eps = allowed, refuses_eps
        self._as_error, self._warn = as_error, warn

    def check_model(self, model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
        """Report the float16 parameters of a model that have no masters.

        Args:
            model: Has the parameters and their names.
            optimizers: The optimizers that may hold them.
        """
        params = [
            param
            for param in model.parameters()
            if param.requires_grad and param.dtype is torch.float16
        ]
        if params:
            for optimizer, held in optimizers_of(params, optimizers):
                self._report(optimizer, held, (model, optimizer))

    def check_step(self, step: OptimizerStep) -> None:
        """Report the parameters of an optimizer before its first step."""
        optimizer, sources = step.optimizer, step.name_sources
        params = without_masters(optimizer)
        if not params:
            return
        if self._allowed:
            if self._refuses_eps and step.mode is StepMode.FLAG:
                check_eps(optimizer, params, sources)
        elif step.mode is not StepMode.FLAG and keeps_no_masters(optimizer):
            # Gradients of other optimizers are refused when they are collected.
            self._report(optimizer, params, sources)

    def _report(
        self, optimizer: Any, params: list[Tensor], sources: tuple[Any, ...]
    ) -> None:
        message = report(optimizer, params, sources)
        if self._as_error:
            raise ConfigError(message, code="GS120")
        self._warn.float16_params(message)


def fp32_trainable_(model: torch.nn.Module) -> list[str]:
    """Cast the trainable half-precision parameters of a model to f32, in place.

    Frozen ones keep their dtype: the usual layout of LoRA on a float16 model. Compute
    under `torch.autocast` from then on. Optimizers that hold the parameters stay valid
    if they have not stepped yet.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).half()
    >>> _ = model[0].requires_grad_(False)
    >>> fp32_trainable_(model)
    ['1.weight', '1.bias']
    >>> model[0].weight.dtype, model[1].weight.dtype
    (torch.float16, torch.float32)

    Returns:
        The names of the parameters that were cast.
    """
    cast = []
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16):
            grad, param.grad = param.grad, None
            param.data = param.data.float()
            param.grad = None if grad is None else grad.float()
            cast.append(name)
    return cast


def without_masters(optimizer: Any) -> list[Tensor]:
    """Return the trainable float16 parameters that the optimizer has no masters of."""
    if isinstance(optimizer, (FusedOptimizer, MasterWeights)):
        return []
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        # Non-tensors are refused when gradients are collected.
        if isinstance(param, Tensor)
        and param.dtype is torch.float16
        and param.requires_grad
    ]


def keeps_no_masters(optimizer: Any) -> bool:
    """Return whether the class is torch's: others may have masters of their own."""
    # Adafactor and Muon claim to be of torch.optim itself.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def report(optimizer: Any, params: Sequence[Tensor], sources: Sequence[Any]) -> str:
    """Return the message on float16 parameters without masters, with the remedy.

    Args:
        optimizer: The optimizer that steps them.
        params: At least one.
        sources: The sources of `names_of`.
    """
    return (
        f"{_listed(optimizer, params, sources)}, and it has no float32 masters. "
        "Updates below 2^-11 of a weight are rounded away, and small values in the "
        f"optimizer's state become 0. {float16_remedy(optimizer)}"
    )


def check_eps(optimizer: Any, params: Sequence[Tensor], sources: Sequence[Any]) -> None:
    """Refuse an optimizer whose `eps` is 0 in the dtype of its parameters.

    Args:
        optimizer: Steps float16 parameters in float16.
        params: The float16 parameters.
        sources: The sources of `names_of`.

    Raises:
        ConfigError: `eps` is 0 in float16.
    """
    ids = set(map(id, params))
    for group in optimizer.param_groups:
        if ids.isdisjoint(map(id, group["params"])):
            continue
        eps = group.get("eps")
        # Adafactor of torch has two. That of transformers computes in float32.
        several = isinstance(eps, tuple) and keeps_no_masters(optimizer)
        for value in eps if several else (eps,):
            if isinstance(value, (int, float)) and _is_0_in_float16(value):
                raise ConfigError(
                    f"{_listed(optimizer, params, sources)}, with eps={value:g}, which "
                    "is 0 in float16. Where a gradient is 0 or its square underflows, "
                    "the step divides by 0 and the weights become NaN. "
                    f"{float16_remedy(optimizer)} To stay in float16, pass eps=1e-4.",
                    code="GS125",
                )


def _is_0_in_float16(value: float) -> bool:
    return torch.tensor(value, dtype=torch.float16).item() == 0.0


def optimizers_of(
    params: Sequence[Tensor], optimizers: Sequence[Any]
) -> list[tuple[Any, list[Tensor]]]:
    """Return the optimizers without masters of some parameters, and those parameters.

    Args:
        params: The trainable float16 parameters of a model.
        optimizers: Candidates.
    """
    # An optimizer inside of MasterWeights may have another one inside, as SAM has.
    wrapped = [one for one in optimizers if isinstance(one, MasterWeights)]
    covered = {id(p) for one in wrapped for g in one.param_groups for p in g["params"]}
    wanted = set(map(id, params)) - covered
    found = []
    for one in optimizers:
        if keeps_no_masters(one):
            held = [param for param in without_masters(one) if id(param) in wanted]
            if held:
                found.append((one, held))
    return found


def _listed(optimizer: Any, params: Sequence[Tensor], sources: Sequence[Any]) -> str:
    names = names_of(params[:MOST_NAMES], sources)
    more = len(params) - len(names)
    what = "parameters are" if len(params) > 1 else "parameter is"
    return (
        f"{len(params)} trainable {what} float16 in {type(optimizer).__name__}: "
        f"{', '.join(names)}{f' and {more} more' if more else ''}"
    )
