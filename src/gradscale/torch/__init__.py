"""Loss scaling for PyTorch: a drop-in for `torch.amp.GradScaler`."""

from gradscale.torch.scaler import GradScaler

__all__ = ["GradScaler"]
