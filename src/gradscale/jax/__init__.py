"""Loss scaling for JAX: pure functions, a wrapper for optax optimizers, a recorder.

>>> import jax, optax
>>> from gradscale import DynamicScale
>>> from gradscale.jax import loss_scaled
>>> optimizer = loss_scaled(optax.adamw(1e-3), DynamicScale(), max_norm=1.0)
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import jax as _jax  # noqa: F401  # a better message if it is missing
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "gradscale.jax needs JAX, which is not installed. Run "
        "pip install 'gradscale[jax]'.",
        name="jax",
    ) from error

from gradscale.jax.culprits import culprits
from gradscale.jax.differentiation import scaled_value_and_grad, value_and_grad
from gradscale.jax.last_step import Counts, LastStep
from gradscale.jax.precision import Precision
from gradscale.jax.reading import Reading, all_finite, observe
from gradscale.jax.retry import retried_value_and_grad
from gradscale.jax.scaling import JAX, scale, select, unscale, update
from gradscale.jax.state import (
    LossScaledState,
    counts,
    current_scale,
    init,
    last,
    raise_if_collapsed,
)

if TYPE_CHECKING:
    from gradscale.jax.accumulation import MultiSteps
    from gradscale.jax.optimizer import loss_scaled
    from gradscale.jax.recorder import Recorder, record_step

__all__ = [
    "JAX",
    "Counts",
    "LastStep",
    "LossScaledState",
    "MultiSteps",
    "Precision",
    "Reading",
    "Recorder",
    "all_finite",
    "counts",
    "culprits",
    "current_scale",
    "init",
    "last",
    "loss_scaled",
    "observe",
    "raise_if_collapsed",
    "record_step",
    "retried_value_and_grad",
    "scale",
    "scaled_value_and_grad",
    "select",
    "unscale",
    "update",
    "value_and_grad",
]

# Loaded on first access: the first two need optax, the others SQLite.
_LAZY = {
    "MultiSteps": "gradscale.jax.accumulation",
    "loss_scaled": "gradscale.jax.optimizer",
    "Recorder": "gradscale.jax.recorder",
    "record_step": "gradscale.jax.recorder",
}


def __getattr__(name: str) -> Any:
    """Load a name of `_LAZY`."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        raise ModuleNotFoundError(
            f"gradscale.jax.{name} wraps optimizers of optax, which is not installed. "
            "Run pip install 'gradscale[jax]'.",
            name="optax",
        ) from error
