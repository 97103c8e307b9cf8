"""Small models, spread over ranks in the ways that people use."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH = 8


class Block(nn.Module):
    """A norm, two layers that tensor parallelism cuts, and one that it does not."""

    def __init__(self):
        super().__init__()
        self.scatter = nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x):
        """Return four numbers for each position of f32[batch, position, WIDTH]."""
        return self.out(x + self.down(self.up(self.norm(self.scatter(x))).relu()))


# The norm sees a part of the positions on each rank: the gradients of its parameters
# are sums that are still apart.
TENSOR_PARALLEL = {
    "scatter": PrepareModuleInput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        use_local_output=True,
    ),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
}


def block():
    """Return the same block on every rank and in every process."""
    torch.manual_seed(0)
    return Block()


def sharded():
    """Return the block, its parameters cut by FSDP2 over all ranks."""
    model = block()
    fully_shard(model.up)
    fully_shard(model)
    return model


def tensor_parallel(mesh=None):
    """Return the block, cut by tensor parallelism; `out` is ordinary."""
    model = block()
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,)) if mesh is None else mesh
    return parallelize_module(model, mesh, TENSOR_PARALLEL)


def two_dimensional():
    """Return the block on a mesh of FSDP2 and tensor parallelism; four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(tensor_parallel(mesh["tensor"]), mesh=mesh["data"])
