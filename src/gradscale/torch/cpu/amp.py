"""`torch.cpu.amp.GradScaler`: the scaler with the older signature."""

from gradscale.torch.compat import OlderGradScaler

__all__ = ["GradScaler"]


class GradScaler(OlderGradScaler):
    """`gradscale.torch.GradScaler("cpu", ...)` without the device argument."""

    kind = "cpu"
