"""FusedSGD on gradscale's kernels."""

from typing import Any

from gradscale.errors import AmpError
from gradscale.torch.optim import SGD


class FusedSGD(SGD):
    """`gradscale.torch.optim.SGD` with apex's arguments.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedSGD([weight], lr=0.5, momentum=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: As in torch's SGD.
        wd_after_momentum: Refused if True.
        materialize_master_grads: Has no effect: at O2 the masters always have
            gradients, which clipping needs. Steps are the same.
        set_grad_none: `zero_grad` removes gradients instead of filling them with 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise AmpError(
                "wd_after_momentum=True was given. The kernel adds weight decay to the "
                "gradient before the momentum. Leave it out, or use torch.optim.SGD "
                "and decay the weights yourself.",
                code="GS101",
            )
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
