"""A drop-in for MXNet 1.9.1's `mxnet.contrib.amp`, by one changed import.

`from gradscale.mxnet import amp` instead of `from mxnet.contrib import amp`. Casts are
MXNet's own; the loss scaling is gradscale's:

- An overflow backs the scale off at once, not one step later.
- The gradients of all devices are checked, not only those of the first.
- The scale has a floor; a trainer without gradients is no error.
- A trainer that updates its weights on the key-value store is refused.
- `init_trainer` does not need `init`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mxnet.contrib.amp.amp import (
    convert_bucketing_module,
    convert_hybrid_block,
    convert_model,
    convert_symbol,
    init,
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
)

from gradscale.core.policies import DynamicScale, Policy
from gradscale.errors import ConfigError
from gradscale.mxnet.scaler import MXNET_CEILING, LossScaler
from gradscale.mxnet.trainers import attach, scaler_of

if TYPE_CHECKING:
    from gradscale.mxnet.recorder import Recorder

__all__ = [
    "convert_bucketing_module",
    "convert_hybrid_block",
    "convert_model",
    "convert_symbol",
    "init",
    "init_loss_scaling",
    "init_trainer",
    "list_conditional_fp32_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
    "scale_loss",
    "unscale",
]


def init_trainer(optimizer_or_trainer: Any) -> None:
    """Make a Gluon trainer use loss scaling with MXNet's settings.

    2^16, doubled on every 2000th finite step in a row, 2^24 at most, halved after an
    overflow, 2^-24 at least. For other settings, see `init_loss_scaling`.

    Args:
        optimizer_or_trainer: A `mxnet.gluon.Trainer`.

    Raises:
        TypeError: It is not a Gluon trainer.
        ConfigError: It updates its weights on the key-value store (GS131).
    """
    attach(optimizer_or_trainer, LossScaler())


def init_loss_scaling(
    trainer: Any,
    policy: Policy | None = None,
    *,
    recorder: "Recorder | None" = None,
    **settings: Any,
) -> LossScaler:
    """Make a Gluon trainer use loss scaling with any settings; return its scaler.

    Not a name of MXNet: `init_trainer` with settings.

    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(1, in_units=2)
    >>> net.initialize(mx.init.One())
    >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    >>> scaler = init_loss_scaling(trainer, init_scale=1024.0, growth_interval=2)
    >>> for _ in range(3):
    ...     with mx.autograd.record():
    ...         loss = net(mx.nd.ones((4, 2))).mean()
    ...         with scale_loss(loss, trainer) as scaled:
    ...             scaled.backward()
    ...     trainer.step(1)
    ...     print(scaler.last.applied, scaler.last.scale)
    True 1024.0
    True 1024.0
    True 2048.0

    Args:
        trainer: A `mxnet.gluon.Trainer`.
        policy: `DynamicScale`, `StaticScale` or `NoScale`; None for `DynamicScale` with
            a ceiling of 2^24 and the settings.
        recorder: Records the run.
        settings: Arguments of `DynamicScale`.

    Raises:
        TypeError: It is not a Gluon trainer.
        ConfigError: It updates its weights on the key-value store (GS131), or a
            setting can never work (GS101).
    """
    if policy is not None and settings:
        raise ConfigError(
            f"{', '.join(settings)} was passed together with a policy, which has "
            "settings of its own. Pass DynamicScale(...) with all of them, or leave "
            "the policy out.",
            code="GS101",
        )
    if policy is None:
        policy = DynamicScale(**{"max_scale": MXNET_CEILING, **settings})
    scaler = LossScaler(policy, recorder=recorder)
    attach(trainer, scaler)
    if recorder is not None:
        recorder.bind(trainer)
    return scaler


@contextmanager
def scale_loss(loss: Any, optimizer_or_trainer: Any) -> Iterator[Any]:
    """Scale a loss; its gradients are unscaled by the trainer's next step.

    To be used inside `autograd.record()`:

        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)

    Args:
        loss: An array, or a list or tuple of them, one for each device.
        optimizer_or_trainer: The trainer, after `init_trainer`.

    Raises:
        OrderError: The trainer has no loss scaler yet.
    """
    scaler = scaler_of(optimizer_or_trainer)
    scaled = scaler.scale(loss)
    original = optimizer_or_trainer._amp_original_scale
    optimizer_or_trainer._scale = original / scaler.loss_scale
    yield scaled


def unscale(optimizer_or_trainer: Any) -> None:
    """Unscale the gradients in place, for clipping by hand. Waits for the devices.

    With several devices, call `trainer.allreduce_grads()` before and `trainer.update()`
    after the clipping. Small elements of float16 gradients underflow; a warning names
    the alternative (GS105).

    Args:
        optimizer_or_trainer: The trainer, after the backward pass.

    Raises:
        OrderError: The trainer has no loss scaler yet.
    """
    scaler = scaler_of(optimizer_or_trainer)
    scaler.unscale(optimizer_or_trainer._params, optimizer_or_trainer._scale)
    optimizer_or_trainer._scale = 1.0
