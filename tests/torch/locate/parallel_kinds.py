"""Cases of `test_kinds_of_models` on two ranks: distributed models."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler
from tests.torch.locate.kinds_of_models import STEPS, WIDTH, batch
from tests.torch.parallel.launch import Cases

CASES = Cases()


def _tensor_parallel(*, use_local_output=True):
    # Between the modules there are DTensors, local tensors or both.
    plan = {
        "0": ColwiseParallel(use_local_output=use_local_output),
        "2": RowwiseParallel(use_local_output=use_local_output),
    }
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return parallelize_module(_mlp(), mesh, plan)


def _mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
    )


def _sharded():
    model = _mlp()
    fully_shard(model[0])
    return fully_shard(model)


SPREADS = {
    "tensor parallel": _tensor_parallel,
    "tensor parallel, DTensors between modules": partial(
        _tensor_parallel, use_local_output=False
    ),
    "FSDP2": _sharded,
    "DDP": lambda: DistributedDataParallel(_mlp()),
}


def trained(model, scaler):
    """Train for the steps of the other kinds; return what must be the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, scales, enabled = [], [], False
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _local(model(batch(step))).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        if isinstance(scaler, GradScaler):
            enabled |= scaler._monitor.module_hooks.enabled
    weights = [_local(param.detach()).tolist() for param in model.parameters()]
    return {"losses": losses, "scales": scales, "weights": weights}, enabled


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _hooks(model):
    return [len(module._forward_hooks) for module in model.modules()]


@CASES.case("all")
def _all(rank):
    found = {}
    for name, make in SPREADS.items():
        expected, _ = trained(make(), torch.amp.GradScaler("cpu"))
        model = make()
        before = _hooks(model)
        result, enabled = trained(model, GradScaler("cpu"))
        # As text: NaN is not equal to itself.
        found[name] = {
            "expected": repr(expected),
            "result": repr(result),
            "enabled": enabled,
            "gone": _hooks(model) == before,
        }
    return found
