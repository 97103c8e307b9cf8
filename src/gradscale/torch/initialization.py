"""Prepares model, optimizers and scaler for a precision level, in one call."""

from typing import Any, NamedTuple

import torch

from gradscale.errors import ConfigError
from gradscale.recording.console import say
from gradscale.torch.monitor.recorder import process_here
from gradscale.torch.precision.levels import (
    cast_to_level_,
    level_of,
    optimizer_at_level,
)
from gradscale.torch.scaler import GradScaler


class Initialized(NamedTuple):
    """The model, optimizers and scaler of a training loop.

    Attributes:
        model: The model, or the list of models, as given.
        optimizer: The optimizer, or the list of them, perhaps wrapped; None if none
            was given.
        scaler: The scaler.
    """

    model: Any
    optimizer: Any
    scaler: GradScaler


def initialize(
    model: Any,
    optimizers: Any = None,
    level: str = "O1",
    *,
    dtype: torch.dtype = torch.float16,
    device: str | torch.device | None = None,
    scaler: dict[str, Any] | None = None,
    **changes: Any,
) -> Initialized:
    """Prepare model and optimizers for a precision level, and make the scaler.

    The model is changed in place: its weights are cast to the dtypes of the level, and
    its forward pass casts inputs and outputs, so the loop needs no autocast. Call this
    function after moving the model to its device and before DDP or `torch.compile`.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer, scaler = initialize(model, optimizer, "O2")
    >>> loss = model(torch.ones(8, 4)).square().mean()
    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> model.weight.dtype, optimizer.state[model.weight]["master"].dtype, loss.dtype
    (torch.float16, torch.float32, torch.float32)

    Args:
        model: The model, or several.
        optimizers: The optimizer, or several; None for none.
        level: "O0" (f32), "O1" (autocast), "O2" (half-precision weights, norms in f32,
            f32 masters) or "O3" (half precision throughout).
        dtype: The half precision: `torch.float16`, or `torch.bfloat16`, under which
            the loss is not scaled unless a `policy` is given.
        device: Of the scaler; None for that of the first parameter.
        scaler: Further arguments of `GradScaler`.
        **changes: Settings of `Level` in place of the level's own: `cast_model`,
            `autocast`, `keep_fp32`, `masters`, `outputs`, `policy`.
    """
    models, given = _listed(model), _listed(optimizers)
    if len(set(map(id, given))) < len(given):
        raise ConfigError(
            "One optimizer was given twice. It would be wrapped twice. Pass each "
            "optimizer once.",
            code="GS101",
        )
    settings = level_of(level, dtype, changes)
    before: dict[torch.Tensor, torch.Tensor] = {}
    for one in models:
        before |= cast_to_level_(one, settings)
    made = [optimizer_at_level(one, settings, before) for one in given]
    if device is None:
        params = (param for one in models for param in one.parameters())
        device = next((param.device for param in params), torch.device("cpu"))
    if dtype is torch.bfloat16 and level != "O0" and "policy" not in changes:
        text = (
            "GS004 bfloat16: the loss is not scaled (NoScale), because bfloat16 has "
            "the exponents of float32; non-finite steps are skipped. Pass policy= to "
            "scale it"
        )
        say(text, rank=process_here().rank, normal=True)
    half_steps = level == "O3" and not settings.masters
    options = {
        "policy": settings.policy,
        "allow_fp16": half_steps,
        "model": models[0] if len(models) == 1 else None,
        **(scaler or {}),
    }
    return Initialized(
        models if _is_many(model) else model,
        None if optimizers is None else made if _is_many(optimizers) else made[0],
        GradScaler(device, **options),
    )


def _is_many(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if _is_many(value) else [value]
