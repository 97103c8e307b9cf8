"""SGD, each step in one pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.kernels import Kernels
from gradscale.torch.kernels.args import AmpArgs, MomentumLists, SgdConfig
from gradscale.torch.kernels.optimizer_pass import sgd_
from gradscale.torch.optim.base import FusedOptimizer
from gradscale.torch.optim.batches import Batch, BatchStep
from gradscale.torch.optim.settings import (
    check_lr,
    check_momentum,
    check_weight_decay,
    number,
    rate_on,
)
from gradscale.torch.optim.state import MASTER, STEP

BUFFER = "momentum_buffer"


class SGD(FusedOptimizer, torch.optim.SGD):
    """SGD as in `torch.optim.SGD`, in one pass with unscaling and the skip.

    All arguments up to `fused` are those of torch; see `Adam` for their effect, for the
    others, and for f16 and bf16 parameters. The momentum starts from zeros, so that
    it is defined after a skipped first step.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = SGD([weight], lr=0.5, momentum=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> optimizer.step()
    >>> weight.tolist()
    [-0.25, -0.25]
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        write_back: bool = False,
        kernels: Kernels = "auto",
        check_data: bool = False,
    ) -> None:
        check_lr(lr)
        check_momentum(momentum, dampening, nesterov)
        check_weight_decay(weight_decay)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        FusedOptimizer.__init__(self, params, defaults, write_back, kernels, check_data)

    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the entries in the state of each parameter."""
        if group["momentum"] == 0:
            return ()
        # Without dampening, zeros make the first step equal to torch's.
        return (BUFFER,) if group["dampening"] == 0 else (STEP, BUFFER)

    def first_count(self, state: dict[str, Any]) -> float:
        """Return 0 if no step was taken yet, else 1: only the first step differs."""
        return 0.0 if state.get(BUFFER) is None else 1.0

    def lists(self, batch: Batch, grads: Sequence[Tensor]) -> MomentumLists:
        """Return the tensors of one pass."""
        return MomentumLists(
            params=batch.params,
            grads=grads,
            momenta=batch.columns.get(BUFFER, []),
            masters=batch.columns.get(MASTER, []),
            steps=batch.columns.get(STEP, []),
        )

    def update_(self, step: BatchStep, amp: AmpArgs) -> None:
        """Run one pass."""
        group, batch, lists, layout = step
        config = SgdConfig(
            lr=rate_on(group["lr"], batch.device, batch.wide),
            momentum=number("momentum", group["momentum"]),
            dampening=number("dampening", group["dampening"]),
            weight_decay=number("weight_decay", group["weight_decay"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        sgd_(lists, config, amp, layout, batch.table)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format. Syncs once if dampening is used.

        The momentum is None before the first applied step.
        """
        # Called first: the user's hooks get the format of torch.
        handle = self.register_state_dict_post_hook(_as_in_torch, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()


def _as_in_torch(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    shown = dict(state_dict["state"])
    counted: dict[torch.device, list[Any]] = {}
    for key, state in shown.items():
        if isinstance(state, dict) and STEP in state:
            counted.setdefault(state[STEP].device, []).append(key)
    for keys in counted.values():
        counts = torch.stack([shown[key][STEP] for key in keys]).tolist()
        for key, count in zip(keys, counts, strict=True):
            shown[key] = {name: v for name, v in shown[key].items() if name != STEP}
            if count == 0.0:
                shown[key][BUFFER] = None
    return {**state_dict, "state": shown}
