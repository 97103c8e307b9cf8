"""Loss scaling for PyTorch: a drop-in for `torch.amp.GradScaler`."""

from gradscale.torch.attach.watch import watch
from gradscale.torch.monitor.recorder import Recorder
from gradscale.torch.scaler import GradScaler
from gradscale.torch.sharded import ShardedGradScaler

__all__ = ["GradScaler", "Recorder", "ShardedGradScaler", "watch"]
