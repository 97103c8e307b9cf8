"""Loss scaling for MXNet 1.9.1: a drop-in for its `amp`, and gluon-nlp's scalers.

>>> import mxnet as mx
>>> from gradscale.mxnet import amp
>>> net = mx.gluon.nn.Dense(1)
>>> net.initialize()
>>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
>>> amp.init_trainer(trainer)
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import mxnet as _mxnet  # noqa: F401  # a better message if it is missing
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    raise ModuleNotFoundError(
        "gradscale.mxnet needs MXNet, which is not installed. Run "
        "pip install 'gradscale[mxnet]'.",
        name="mxnet",
    ) from error

from gradscale.mxnet import amp
from gradscale.mxnet.gluon_nlp import DynamicLossScaler, FP16Trainer, StaticLossScaler
from gradscale.mxnet.scaler import LossScaler

if TYPE_CHECKING:
    from gradscale.mxnet.recorder import Recorder

__all__ = [
    "DynamicLossScaler",
    "FP16Trainer",
    "LossScaler",
    "Recorder",
    "StaticLossScaler",
    "amp",
]


def __getattr__(name: str) -> Any:
    """Load `Recorder` on first access: it needs SQLite."""
    if name != "Recorder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("gradscale.mxnet.recorder").Recorder
