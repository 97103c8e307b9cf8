"""Puts a loss scaler around the optimizer of a model."""

from typing import Any

import keras

from gradscale.core.policies import Policy, StaticScale
from gradscale.errors import ConfigError
from gradscale.keras.optimizer import KerasLossScaleOptimizer, LossScaleOptimizer


def compile(
    model: Any,
    optimizer: Any = "rmsprop",
    *,
    policy: Policy | None = None,
    **kwargs: Any,
) -> None:
    """Compile a model, its optimizer wrapped in a `LossScaleOptimizer` of gradscale.

    >>> import keras
    >>> from gradscale.keras import compile
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> compile(model, keras.optimizers.SGD(0.1), loss="mse")
    >>> type(model.optimizer).__module__
    'gradscale.keras.optimizer'

    Args:
        model: A Keras model.
        optimizer: Its optimizer, as for `model.compile`; see `loss_scaled`.
        policy: The policy; by default as for `loss_scaled`.
        kwargs: The other arguments of `model.compile`.
    """
    model.compile(optimizer=loss_scaled(optimizer, policy), **kwargs)


def loss_scaled(optimizer: Any, policy: Policy | None = None) -> LossScaleOptimizer:
    """Return an optimizer wrapped in a `LossScaleOptimizer` of gradscale.

    A `loss_scale_factor` of the optimizer becomes a `StaticScale`: Keras itself
    discards it when it wraps an optimizer. Keras' own `LossScaleOptimizer` is
    converted; if it was built, the result has a copy of its state.

    >>> import keras
    >>> loss_scaled(keras.optimizers.SGD(0.1, loss_scale_factor=64.0)).policy
    StaticScale(scale=64.0)
    >>> loss_scaled("adam").policy.init_scale
    32768.0

    Args:
        optimizer: An optimizer, its name or its configuration.
        policy: The policy; by default that of the optimizer, and if it has none, the
            rule of Keras with bounds.

    Raises:
        ConfigError: There is no optimizer, or it has a policy or a `loss_scale_factor`
            and another policy was passed.
    """
    given = keras.optimizers.get(optimizer)
    if given is None:
        raise ConfigError(
            "optimizer=None was passed. There is no step whose loss could be scaled. "
            "Pass an optimizer, its name or its configuration.",
            code="GS101",
        )
    ours = isinstance(given, LossScaleOptimizer)
    if isinstance(given, KerasLossScaleOptimizer) and not ours:
        return _converted(given, policy)
    own = given.policy if ours else _static(given.loss_scale_factor)
    if own is not None and policy is not None and policy != own:
        raise ConfigError(
            f"policy={policy!r} was passed for an optimizer that has the policy "
            f"{own!r} already. Only one of them can set the scale. Pass one of them.",
            code="GS101",
        )
    return given if ours else LossScaleOptimizer(given, policy=policy or own)


def _static(factor: float | None) -> StaticScale | None:
    return None if factor is None else StaticScale(scale=factor)


def _converted(given: Any, policy: Policy | None) -> LossScaleOptimizer:
    """Return a copy of Keras' own wrapper, with its state."""
    settings = given.get_config()
    if policy is not None:
        settings = {"inner_optimizer": settings["inner_optimizer"], "policy": policy}
    converted = LossScaleOptimizer.from_config(settings)
    if given.built:
        state: dict[str, Any] = {}
        given.save_own_variables(state)
        converted.build(given._trainable_variables)
        converted.load_own_variables(state)
    return converted
