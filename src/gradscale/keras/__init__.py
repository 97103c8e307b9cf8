"""Loss scaling for Keras on the TensorFlow, JAX and torch backends.

>>> import keras
>>> from gradscale.keras import LossScaleOptimizer
>>> optimizer = LossScaleOptimizer(keras.optimizers.Adam())
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import keras as _keras  # noqa: F401  # a better message if it is missing
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ModuleNotFoundError(
        "gradscale.keras needs Keras, which is not installed. Run "
        "pip install 'gradscale[keras]'.",
        name="keras",
    ) from error

from gradscale.keras.compilation import compile, loss_scaled
from gradscale.keras.optimizer import LossScaleOptimizer

if TYPE_CHECKING:
    from gradscale.keras.monitor import Monitor

__all__ = ["LossScaleOptimizer", "Monitor", "compile", "loss_scaled"]


def __getattr__(name: str) -> Any:
    """Load `Monitor` on first access: it needs SQLite."""
    if name != "Monitor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("gradscale.keras.monitor").Monitor
