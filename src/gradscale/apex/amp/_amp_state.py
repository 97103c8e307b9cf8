"""The state of amp in this process, under the names that apex's users read."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradscale.core.outcome import StepOutcome
from gradscale.errors import GradscaleWarning
from gradscale.recording.console import say
from gradscale.torch.messages import warn_at_caller
from gradscale.torch.monitor.recorder import process_here


class AmpState:
    """The state that `initialize` sets up.

    Attributes:
        loss_scalers: The scale of each loss, by `loss_id`.
        handle: The casts of O1, active or not; None before the first.
        opt_properties: The settings; missing before the first `initialize`.
        allow_incoming_model_not_fp32: Accept half-precision models.
        verbosity: 0 prints nothing.
        exact: Reproduce apex's defects; see `initialize`.
        check_data: Keep writes through `.data`; see `initialize`.
        last: The outcome of the last backward pass that was unscaled.
        models: Where parameter names are looked up.
    """

    def __init__(self) -> None:
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.exact = False
        self.check_data = False
        self.handle: Any = None
        self.loss_scalers: list[Any] = []
        self.last: StepOutcome | None = None
        self.models: list[Any] = []
        self.opt_properties: Any

    def print(self, text: str) -> None:
        """Report a line on rank 0, unless `verbosity` is 0."""
        if self.verbosity > 0:
            say(text, rank=process_here().rank, normal=True)

    def warn(self, text: str, code: str) -> None:
        """Issue a warning, unless `verbosity` is 0."""
        if self.verbosity > 0:
            warn_at_caller(GradscaleWarning(text, code=code))


_amp_state = AmpState()


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer steps: f32 masters at O2, else parameters.

    After `scale_loss` they have the unscaled gradients, for clipping.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> [p is weight for p in master_params(torch.optim.SGD([weight], lr=0.1))]
    [True]

    Args:
        optimizer: As `initialize` returned it.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
