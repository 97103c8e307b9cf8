"""Lion, each step in one pass."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradscale.torch.kernels import Kernels
from gradscale.torch.kernels.args import AmpArgs, LionConfig, MomentumLists
from gradscale.torch.kernels.optimizer_pass import lion_
from gradscale.torch.optim.base import FusedOptimizer
from gradscale.torch.optim.batches import Batch, BatchStep
from gradscale.torch.optim.settings import (
    check_betas,
    check_lr,
    check_weight_decay,
    number,
    rate_on,
)
from gradscale.torch.optim.state import MASTER


class Lion(FusedOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675), in one pass with unscaling.

    Every element changes by `lr`, against the sign of a weighted mean of its momentum
    and its gradient. The paper recommends an `lr` 3 to 10 times smaller than for AdamW,
    and a `weight_decay` larger by the same factor.

    Args:
        params: Parameters, named parameters, or groups of them.
        lr: The size of a step; a number, or a tensor of one element, which is never
            read on the host if it is on a device.
        betas: The weights of the momentum in the direction, and in the next momentum.
        weight_decay: Decoupled, multiplied by `lr`.
        maximize: Ascend instead of descend.
        write_back: As in `Adam`.
        kernels: As in `Adam`.
        check_data: As in `Adam`.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = Lion([weight], lr=0.25)
    >>> (weight**4).sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()
    [0.75, -0.75]
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        write_back: bool = False,
        kernels: Kernels = "auto",
        check_data: bool = False,
    ) -> None:
        check_lr(lr)
        check_betas(betas)
        check_weight_decay(weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        FusedOptimizer.__init__(self, params, defaults, write_back, kernels, check_data)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the entries in the state of each parameter."""
        return ("exp_avg",)

    def lists(self, batch: Batch, grads: Sequence[Tensor]) -> MomentumLists:
        """Return the tensors of one pass."""
        return MomentumLists(
            params=batch.params,
            grads=grads,
            momenta=batch.columns["exp_avg"],
            masters=batch.columns.get(MASTER, []),
            steps=[],
        )

    def update_(self, step: BatchStep, amp: AmpArgs) -> None:
        """Run one pass."""
        group, batch, lists, layout = step
        beta1, beta2 = group["betas"]
        config = LionConfig(
            lr=rate_on(group["lr"], batch.device, batch.wide),
            beta1=number("betas[0]", beta1),
            beta2=number("betas[1]", beta2),
            weight_decay=number("weight_decay", group["weight_decay"]),
            maximize=group["maximize"],
        )
        lion_(lists, config, amp, layout, batch.table)
