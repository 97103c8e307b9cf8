"""The older signature of the scaler: no device argument, the initial scale first."""

import warnings
from typing import Any, ClassVar

from gradscale.torch.scaler import GradScaler


class OlderGradScaler(GradScaler):
    """Base class of the scalers of `torch.cuda.amp` and `torch.cpu.amp`."""

    kind: ClassVar[str]
    _frames_to_caller = 4

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        # Torch's own text, so that existing warning filters match.
        warnings.warn(
            f"`torch.{self.kind}.amp.GradScaler(args...)` is deprecated. "
            f"Please use `torch.amp.GradScaler('{self.kind}', args...)` instead.",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(
            self.kind,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            **options,
        )
