"""Attaches loss scalers to Gluon trainers, and refuses trainers that cannot work."""

from typing import Any

from mxnet import gluon, optimizer
from mxnet.contrib.amp import amp as mxnet_amp

from gradscale.errors import ConfigError, OrderError
from gradscale.mxnet.scaler import LossScaler


def attach(trainer: Any, scaler: LossScaler) -> None:
    """Make a trainer check and skip its steps with a scaler.

    A scaler that was attached before is replaced.

    Raises:
        TypeError: It is not a Gluon trainer.
        ConfigError: The trainer updates its weights on the key-value store.
    """
    check_trainer(trainer)
    update_outside_kvstore(trainer)
    # Divided by the scale of an earlier scaler, if there was one.
    original = getattr(trainer, "_amp_original_scale", trainer._scale)
    if mxnet_amp._amp_initialized:
        # The first trainer gets the scaler that loss output operators refer to.
        mxnet_amp.init_trainer(trainer)
        own = mxnet_amp._loss_scaler
        scaler.mirror(own if trainer._amp_loss_scaler is own else None)
    trainer._scale = original
    trainer._amp_original_scale = original
    trainer._amp_loss_scaler = scaler


def scaler_of(trainer: Any) -> LossScaler:
    """Return the scaler of a trainer.

    Raises:
        TypeError: It is not a Gluon trainer.
        OrderError: The trainer has no scaler of gradscale.
    """
    check_trainer(trainer)
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if not isinstance(scaler, LossScaler):
        raise OrderError(
            f"The trainer has no loss scaler of gradscale but {scaler!r}. There is no "
            "scale to apply. Call gradscale.mxnet.amp.init_trainer(trainer) first.",
            code="GS102",
            replaces="Loss scaler is not initialized, did you forget to call "
            "amp.init_trainer()?",
        )
    return scaler


def check_trainer(trainer: Any) -> None:
    """Raise unless it is a Gluon trainer."""
    if isinstance(trainer, optimizer.Optimizer):
        raise TypeError(
            f"A {type(trainer).__name__} was passed, an optimizer. Loss scaling skips "
            "whole steps, which a Gluon Trainer takes. Pass the Trainer."
        )
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(
            f"A {type(trainer).__name__} was passed. Loss scaling skips the steps of a "
            "Gluon Trainer. Pass a mxnet.gluon.Trainer."
        )


def update_outside_kvstore(trainer: Any) -> None:
    """Have a trainer update its weights itself; raise if it cannot.

    Raises:
        ConfigError: The trainer updates its weights on the key-value store.
    """
    asked = trainer._kvstore_params["update_on_kvstore"]
    if asked:
        raise _kvstore_error(f"update_on_kvstore={asked} was passed to the Trainer")
    if trainer._update_on_kvstore:
        raise _kvstore_error(
            "The Trainer has been used without loss scaling, by a step or by "
            "load_states()"
        )
    if trainer._contains_sparse_weight:
        raise _kvstore_error("The Trainer has sparse weights")
    kvstore = trainer._kvstore_params["kvstore"]
    kind = kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", "")
    if "async" in kind:
        raise _kvstore_error("The Trainer has an asynchronous key-value store")
    if "dist" in kind and trainer._contains_sparse_grad:
        raise _kvstore_error("The Trainer has sparse gradients on several machines")
    # None lets MXNet choose, and with several devices it chooses the store.
    trainer._kvstore_params["update_on_kvstore"] = False


def _kvstore_error(cause: str) -> ConfigError:
    return ConfigError(
        f"{cause}, so the key-value store updates the weights. It does so while it "
        "sums the gradients, before they can be checked: an infinite gradient would "
        "reach the weights. Pass update_on_kvstore=False to mxnet.gluon.Trainer, with "
        "dense weights and a synchronous store; gradients on several machines must be "
        "dense too.",
        code="GS131",
    )
