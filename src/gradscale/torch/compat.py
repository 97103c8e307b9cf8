"""The older signature: no device argument, the initial scale first."""

import warnings
from typing import Any, ClassVar

from gradscale.torch.scaler import GradScaler


class OlderGradScaler(GradScaler):
    """What the classes of `torch.cuda.amp` and `torch.cpu.amp` have in common."""

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
        # The words of torch: filters out there match them.
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
