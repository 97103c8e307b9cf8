"""Adam and AdamW, each step in one pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.kernels import Kernels
from gradscale.torch.kernels.args import AdamConfig, AdamLists, AmpArgs
from gradscale.torch.kernels.optimizer_pass import adam_
from gradscale.torch.optim.base import FusedOptimizer
from gradscale.torch.optim.batches import Batch, BatchStep
from gradscale.torch.optim.settings import (
    check_betas,
    check_eps,
    check_lr,
    check_weight_decay,
    number,
    rate_on,
)
from gradscale.torch.optim.state import MASTER, STEP


class Adam(FusedOptimizer, torch.optim.Adam):
    """Adam as in `torch.optim.Adam`, in one pass with unscaling and the skip.

    All arguments up to `decoupled_weight_decay` are those of torch. `foreach`, `fused`
    and `capturable` are stored in the groups for checkpoints and have no effect: every
    step is one pass, which can be captured. `differentiable=True` is refused. An `lr`
    on a device is never read on the host.

    f16 and bf16 parameters have an f32 master in `state[p]["master"]`; their moments
    are f32 too.

    Args:
        write_back: Write the unscaled gradients into `.grad`, as torch's fused
            optimizers do. Otherwise `.grad` is not changed.
        kernels: "auto" for Triton where it works, "plain" for torch operations only,
            "triton" to raise where Triton does not work.
        check_data: Also keep writes through `.data` to f16 and bf16 parameters, at the
            cost of reading parameters and masters once more in each step. Without it
            such a write is overwritten; a sampled check reports it once.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = Adam([weight], lr=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])
    >>> isinstance(optimizer, torch.optim.Adam)
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        write_back: bool = False,
        kernels: Kernels = "auto",
        check_data: bool = False,
    ) -> None:
        check_lr(lr)
        check_eps(eps)
        check_betas(betas)
        check_weight_decay(weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        FusedOptimizer.__init__(self, params, defaults, write_back, kernels, check_data)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the entries in the state of each parameter."""
        if group["amsgrad"]:
            return STEP, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
        return STEP, "exp_avg", "exp_avg_sq"

    def lists(self, batch: Batch, grads: Sequence[Tensor]) -> AdamLists:
        """Return the tensors of one pass."""
        return AdamLists(
            params=batch.params,
            grads=grads,
            exp_avgs=batch.columns["exp_avg"],
            exp_avg_sqs=batch.columns["exp_avg_sq"],
            max_exp_avg_sqs=batch.columns.get("max_exp_avg_sq", []),
            masters=batch.columns.get(MASTER, []),
            steps=batch.columns[STEP],
        )

    def update_(self, step: BatchStep, amp: AmpArgs) -> None:
        """Run one pass."""
        group, batch, lists, layout = step
        beta1, beta2 = group["betas"]
        config = AdamConfig(
            lr=rate_on(group["lr"], batch.device, batch.wide),
            beta1=number("betas[0]", beta1),
            beta2=number("betas[1]", beta2),
            eps=number("eps", group["eps"]),
            weight_decay=number("weight_decay", group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
        )
        adam_(lists, config, amp, layout, batch.table)


class AdamW(Adam, torch.optim.AdamW):
    """AdamW as in `torch.optim.AdamW`, in one pass with unscaling and the skip.

    All arguments up to `fused` are those of torch; see `Adam` for their effect, for the
    others, and for f16 and bf16 parameters.

    >>> from gradscale.torch import GradScaler
    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    >>> optimizer = AdamW([weight], lr=0.5)
    >>> scaler = GradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale(weight.float().sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.data
    tensor([0.4951, 0.4951], dtype=torch.float16)
    >>> optimizer.state[weight]["master"]
    tensor([0.4950, 0.4950])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        write_back: bool = False,
        kernels: Kernels = "auto",
        check_data: bool = False,
    ) -> None:
        Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            write_back=write_back,
            kernels=kernels,
            check_data=check_data,
        )
