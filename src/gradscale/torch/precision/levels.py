"""Precision levels: casts, master weights and the scale of the loss."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.policies import DynamicScale, NoScale
from gradscale.errors import ConfigError, check_choice
from gradscale.torch.optim.base import FusedOptimizer
from gradscale.torch.optim.state import MASTER, needs_master
from gradscale.torch.precision.casting import (
    CastForward,
    Kept,
    cast_model_,
    fp32_island,
    kept_modules,
)
from gradscale.torch.precision.master_weights import MasterWeights, master_weights

NORMS: tuple[Kept, ...] = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
)


@dataclass(frozen=True, kw_only=True)
class Level:
    """The settings of a precision level.

    Attributes:
        cast_model: The dtype of the weights, and of the inputs of the forward pass;
            None to leave them.
        autocast: The dtype of `torch.autocast` around the forward pass; None for none.
        keep_fp32: Modules that stay in f32, as islands: types, and patterns for their
            names.
        masters: The optimizers keep f32 masters of half-precision parameters.
        outputs: The dtype of the results of the forward pass; None to leave them.
        policy: The policy of the scale.
    """

    cast_model: torch.dtype | None = None
    autocast: torch.dtype | None = None
    keep_fp32: tuple[Kept, ...] = ()
    masters: bool = False
    outputs: torch.dtype | None = torch.float32
    policy: AnyPolicy = field(default_factory=NoScale)


def level_of(name: str, dtype: torch.dtype, changes: dict[str, Any]) -> Level:
    """Return a level with some of its settings changed.

    >>> level_of("O2", torch.bfloat16, {"keep_fp32": ()}).policy
    NoScale()

    Args:
        name: "O0", "O1", "O2" or "O3".
        dtype: The half precision: float16, whose loss is scaled, or bfloat16.
        changes: Settings by name, each in place of the level's own.
    """
    check_choice("level", name, ("O0", "O1", "O2", "O3"))
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"dtype={dtype} is no half precision. The level would cast nothing. Pass "
            "torch.float16 or torch.bfloat16; for float32, pass level='O0'.",
            code="GS101",
        )
    # The exponents of bfloat16 are those of f32: its gradients do not underflow.
    scale = DynamicScale() if dtype is torch.float16 else NoScale()
    levels = {
        "O0": Level(cast_model=torch.float32),
        "O1": Level(autocast=dtype, policy=scale),
        "O2": Level(cast_model=dtype, keep_fp32=NORMS, masters=True, policy=scale),
        "O3": Level(cast_model=dtype),
    }
    known = [setting.name for setting in fields(Level)]
    unknown = [change for change in changes if change not in known]
    if unknown:
        raise ConfigError(
            f"{unknown[0]}={changes[unknown[0]]!r} is no setting of a level. It would "
            f"have no effect. Pass one of {', '.join(known)}.",
            code="GS101",
        )
    kept = changes.get("keep_fp32", ())
    if not isinstance(kept, (tuple, list, set, frozenset)):
        changes = {**changes, "keep_fp32": (kept,)}
    for setting in ("cast_model", "autocast", "outputs"):
        value = changes.get(setting)
        if value is not None and not _is_float(value):
            raise ConfigError(
                f"{setting}={value!r} is no floating dtype. Nothing could be cast to "
                "it. Pass a dtype such as torch.float32, or None for no cast.",
                code="GS101",
            )
    return replace(levels[name], **changes)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def cast_to_level_(model: torch.nn.Module, level: Level) -> dict[Tensor, Tensor]:
    """Cast a model to a level, in place.

    Returns:
        The unrounded value of each trainable parameter that was rounded.
    """
    if isinstance(model.__dict__.get("forward"), CastForward):
        raise ConfigError(
            f"{type(model).__name__} was given to initialize() before. A second set of "
            "casts would be wrapped around the first. Call initialize() once, on a new "
            "model.",
            code="GS101",
        )
    before: dict[Tensor, Tensor] = {}
    if level.cast_model is not None:
        before = cast_model_(model, level.cast_model, level.keep_fp32)
    else:
        for _, module in list(kept_modules(model, level.keep_fp32)):
            fp32_island(module)
    _check_half_under_autocast(model, level)
    CastForward(
        model, inputs=level.cast_model, autocast=level.autocast, outputs=level.outputs
    ).install()
    return before


def optimizer_at_level(
    optimizer: torch.optim.Optimizer, level: Level, before: dict[Tensor, Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer with the masters that a level requires.

    Args:
        optimizer: Made with the model's parameters.
        level: The level.
        before: The unrounded values of rounded parameters, which become masters.
    """
    if not level.masters:
        if level.cast_model is not None and optimizer.state:
            # Loading casts the state to the dtype of its parameter, as a resume does.
            optimizer.load_state_dict(optimizer.state_dict())
        return optimizer
    optimizer = master_weights(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if param not in before:
            continue
        if isinstance(optimizer, MasterWeights):
            optimizer.set_master(param, before[param])
        elif isinstance(optimizer, FusedOptimizer) and needs_master(param):
            optimizer.state[param].setdefault(MASTER, before[param])
    return optimizer


def _check_half_under_autocast(model: torch.nn.Module, level: Level) -> None:
    if level.autocast is None or level.masters:
        return
    names = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and needs_master(param)
    ]
    if names:
        raise ConfigError(
            f"{names[0]} and {len(names) - 1} more trainable parameters are in half "
            "precision. Autocast works with float32 weights, and half-precision ones "
            "lose small updates. Call gradscale.torch.fp32_trainable_(model) first, or "
            "use level='O2', which keeps float32 masters.",
            code="GS101",
        )
