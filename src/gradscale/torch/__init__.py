"""Loss scaling for PyTorch: a drop-in for `torch.amp.GradScaler`."""

try:
    import torch as _torch  # noqa: F401  # a better message if it is missing
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "gradscale.torch needs PyTorch, which is not installed. Run "
        "pip install 'gradscale[torch]'.",
        name="torch",
    ) from error

from gradscale.torch.attach.watch import watch
from gradscale.torch.initialization import initialize
from gradscale.torch.loops.attempts import attempts
from gradscale.torch.loops.closures import step_with_closure
from gradscale.torch.loops.window import grads_finite
from gradscale.torch.monitor.recorder import Recorder
from gradscale.torch.precision.casting import fp32_island
from gradscale.torch.precision.float16_params import fp32_trainable_
from gradscale.torch.precision.master_weights import master_params, master_weights
from gradscale.torch.scaler import GradScaler
from gradscale.torch.sharded import ShardedGradScaler

__all__ = [
    "GradScaler",
    "Recorder",
    "ShardedGradScaler",
    "attempts",
    "fp32_island",
    "fp32_trainable_",
    "grads_finite",
    "initialize",
    "master_params",
    "master_weights",
    "step_with_closure",
    "watch",
]
