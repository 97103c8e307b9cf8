"""Loss scaling for PyTorch: a drop-in for `torch.amp.GradScaler`."""

from gradscale.torch.recording import Recorder
from gradscale.torch.scaler import GradScaler
from gradscale.torch.sharded import ShardedGradScaler
from gradscale.torch.watching import watch

__all__ = ["GradScaler", "Recorder", "ShardedGradScaler", "watch"]
