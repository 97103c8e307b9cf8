"""Casts models and changes optimizers according to the settings."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscale.apex.amp._amp_state import _amp_state
from gradscale.apex.amp._process_optimizer import process_optimizer, with_hooks
from gradscale.apex.amp.amp import init
from gradscale.apex.amp.scaler import LossScaler
from gradscale.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from gradscale.apex.parallel.LARC import LARC
from gradscale.apex.run_session import run_recorder
from gradscale.apex.step_log import StepLog
from gradscale.errors import AmpError
from gradscale.recording.recorder import Recorder
from gradscale.torch.precision.casting import CastForward, cast_model_

BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
WRAPPERS = (
    torch.nn.parallel.DistributedDataParallel,
    torch.nn.DataParallel,
)


def initialize(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    properties: Any,
    *,
    cast_model_outputs: torch.dtype | None = None,
) -> None:
    """Cast models and change optimizers in place.

    Args:
        models: The models.
        optimizers: The optimizers.
        properties: The settings.
        cast_model_outputs: The dtype of the models' outputs; None for f32 where the
            inputs are cast, and for no cast elsewhere.
    """
    for model in models:
        _check_model(model)
    for optimizer in optimizers:
        _check_optimizer(optimizer, masters=bool(properties.master_weights))
    if len(set(map(id, optimizers))) < len(optimizers):
        raise _given_twice()
    _amp_state.models = list(models)
    before: dict[Tensor, Tensor] = {}
    dtype = properties.cast_model_type or None
    for model in models:
        _unwrap(model)
        if dtype is not None:
            kept = (BATCH_NORM,) if properties.keep_batchnorm_fp32 else ()
            before |= cast_model_(model, dtype, kept)
            for part in model.modules():
                if isinstance(part, torch.nn.RNNBase):
                    # cuDNN needs the weights in one contiguous buffer.
                    part.flatten_parameters()
            model._register_state_dict_hook(_saved_in_f32)
        outputs = cast_model_outputs
        if outputs is None and dtype is not None:
            outputs = torch.float32
        if outputs is not None:
            CastForward(model, inputs=dtype, outputs=outputs).install()
    for optimizer in optimizers:
        masters = bool(properties.master_weights)
        process_optimizer(optimizer, masters=masters, values=before)
        if dtype is not None and optimizer.state:
            # Torch casts the state to the dtype of the parameters as it loads it.
            optimizer.load_state_dict(optimizer.state_dict())
    if properties.patch_torch_functions:
        params = (param for model in models for param in model.parameters())
        init(on_cpu=all(param.device.type == "cpu" for param in params))


def make_scalers(
    loss_scale: float | str,
    num_losses: int,
    *,
    min_loss_scale: float | None,
    max_loss_scale: float,
    exact: bool,
    record: str | os.PathLike[str] | Recorder | None,
    sinks: Sequence[Any],
    guard: Any,
    quiet: bool,
) -> list[LossScaler]:
    """Return the scale of each loss, each with its own record.

    Args:
        loss_scale, min_loss_scale, max_loss_scale, exact: As in `LossScaler`.
        num_losses: Their number.
        record: The run file of loss 0. The others are numbered: run.loss1.gs.
        sinks: Receive the steps of loss 0.
        guard: As in `RecordedRun`.
        quiet: Findings are not printed.
    """
    scalers = []
    for number in range(num_losses):
        scaler = LossScaler(
            loss_scale,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            exact=exact,
        )
        scaler.log = StepLog(
            _recorder(record, number),
            policy=scaler.policy,
            names=_names,
            sinks=() if number else sinks,
            guard=guard,
            quiet=quiet,
        )
        scalers.append(scaler)
    return scalers


def _recorder(
    record: str | os.PathLike[str] | Recorder | None, number: int
) -> Recorder | None:
    if record is None:
        return run_recorder(meta={"loss_id": number})
    if isinstance(record, Recorder):
        return record if number == 0 else None
    path = Path(record)
    if number:
        path = path.with_name(f"{path.stem}.loss{number}{path.suffix}")
    return Recorder(path, meta={"loss_id": number})


def _names() -> list[str]:
    return [name for model in _amp_state.models for name, _ in model.named_parameters()]


def _unwrap(model: torch.nn.Module) -> None:
    """Remove the casts of an earlier call, so that they do not nest."""
    wrapper = model.__dict__.get("forward")
    if isinstance(wrapper, CastForward):
        wrapper.remove()


def _saved_in_f32(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: Any
) -> None:
    """Cast half-precision entries of a state dict to f32, as apex saves them."""
    for key, value in state_dict.items():
        if isinstance(value, Tensor) and value.dtype is torch.float16:
            state_dict[key] = value.float()


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise AmpError(
            f"amp.initialize() was given a {type(model).__name__} as a model. Only "
            "modules can be cast. Pass a torch.nn.Module or a list of them.",
            code="GS101",
        )
    if isinstance(model, WRAPPERS):
        raise AmpError(
            f"amp.initialize() was given a {type(model).__name__}. It holds the "
            "parameters as they were before the casts. Wrap the model that "
            "amp.initialize() returns.",
            code="GS101",
        )
    if _amp_state.allow_incoming_model_not_fp32:
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype is torch.float16:
            raise AmpError(
                f"{name} is in float16. amp.initialize() casts the model itself, and "
                "masters of rounded weights have lost digits. Pass the float32 model, "
                "without .half().",
                code="GS101",
            )


def _check_optimizer(optimizer: Any, *, masters: bool) -> None:
    if isinstance(optimizer, FP16_Optimizer):
        raise AmpError(
            "amp.initialize() was given an FP16_Optimizer. It scales the loss and "
            "keeps masters itself. Pass the optimizer that it wraps.",
            code="GS101",
        )
    if not isinstance(optimizer, (torch.optim.Optimizer, LARC)):
        raise AmpError(
            f"amp.initialize() was given a {type(optimizer).__name__} as an optimizer. "
            "Its parameters cannot be replaced by masters. Pass a "
            "torch.optim.Optimizer, LARC around one, or a list of them.",
            code="GS101",
        )
    if masters and with_hooks(optimizer) is None:
        raise AmpError(
            f"{type(optimizer).__name__} has not called super().__init__(), so it has "
            "no hooks for checkpoints. The masters of O2 would be missing in its "
            "state_dict(). Call it there, or use opt_level='O1'.",
            code="GS101",
        )
    if hasattr(optimizer, "_amp_stash"):
        raise _given_twice()


def _given_twice() -> AmpError:
    return AmpError(
        "One optimizer was given to amp.initialize() twice. Its masters would get "
        "masters. Pass each optimizer once, or make a new one.",
        code="GS101",
    )
