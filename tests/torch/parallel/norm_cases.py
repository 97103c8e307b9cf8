"""Cases of `test_norms`: the norm of gradients that are spread over ranks."""

import torch
from torch.distributed.tensor import DTensor

from gradscale.torch import GradScaler, optim
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.models import block, sharded, tensor_parallel, two_dimensional

CASES = Cases()


def apart(params):
    """Return DTensors and others as two groups: torch's kernels take no mixture."""
    params = list(params)
    spread = [param for param in params if isinstance(param, DTensor)]
    rest = [param for param in params if not isinstance(param, DTensor)]
    return [{"params": group} for group in (spread, rest) if group]


SPREADS = {
    "fsdp2": sharded,
    "tensor": tensor_parallel,
    "two-dimensional": two_dimensional,
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(apart(params), lr=0.1, fused=True),
    "own": lambda params: optim.AdamW(params, lr=0.1),
}


def batch():
    """Return inputs for the block, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 8, generator=generator)


def whole(tensor):
    """Return the tensor, put together again."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norm(model, make, order, unscale):
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(batch()).square().mean()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, 0.01, order)
    scaler.step(optimizer)
    scaler.update()
    weights = {
        name: whole(param.detach()).flatten().tolist()[:6]
        for name, param in model.named_parameters()
    }
    return {"norm": norm.item(), "weights": weights, "applied": scaler.last.applied}


def _enter():
    """Enter each norm on each spread, and any two other settings together once."""
    optimizers = list(OPTIMIZERS.items())
    for i, (spread, model_of) in enumerate(SPREADS.items()):
        for j, order in enumerate((2.0, 1.0, torch.inf)):
            for k, unscale in enumerate((False, True)):
                name, make = optimizers[(i + j + k) % 3]

                @CASES.case(f"{spread}-{name}-{order:g}-{unscale}")
                def _(rank, of=model_of, make=make, order=order, unscale=unscale):
                    alone = _norm(block(), make, order, unscale)
                    return alone, _norm(of(), make, order, unscale)


_enter()
