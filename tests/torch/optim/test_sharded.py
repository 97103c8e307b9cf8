"""DTensor parameters: each process steps on the piece that it holds."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from gradscale.torch import GradScaler
from gradscale.torch.optim import Lion
from tests.torch.optim.streams import KINDS, parameters, same, step_with, stream

kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def shard(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def sharded(tensor, *, whole=False):
        return distribute_tensor(tensor, mesh, [Replicate() if whole else Shard(0)])

    return sharded


@kinds
@dtypes
@pytest.mark.parametrize("whole", [False, True])
def test_a_sharded_parameter_steps_like_a_whole_one(kind, how, dtype, shard, whole):
    (param,) = parameters(dtype, [(4, 3)])
    sharded = torch.nn.Parameter(shard(param.detach()))
    ours, plain = kind([sharded], **how), kind([param], **how)
    for turn, (grad,) in enumerate(stream(5, [(4, 3)], dtype)):
        param.grad, sharded.grad = grad, shard(grad, whole=whole)
        for optimizer in (ours, plain):
            step_with(optimizer, grad_scale=2.0, found_inf=float(turn == 2))
    assert same([sharded.full_tensor()], [param])


@kinds
def test_the_state_of_a_sharded_parameter_is_sharded(kind, how, shard):
    (param,) = parameters(torch.float16, [(4, 3)])
    sharded = torch.nn.Parameter(shard(param.detach()))
    optimizer = kind([sharded], **how)
    sharded.grad = shard(torch.ones(4, 3, dtype=torch.float16))
    optimizer.step()
    entries = {k: v for k, v in optimizer.state[sharded].items() if k != "step"}
    assert {entry.placements for entry in entries.values()} == {sharded.placements}
    assert sharded._version > 0


def test_a_sharded_half_that_was_written_is_taken_over(shard):
    sharded = torch.nn.Parameter(shard(torch.ones(4, 3, dtype=torch.float16)))
    optimizer = Lion([sharded], lr=0.0)
    sharded.grad = shard(torch.ones(4, 3, dtype=torch.float16))
    optimizer.step()
    with torch.no_grad():
        sharded.copy_(shard(torch.full((4, 3), 5.0, dtype=torch.float16)))
    optimizer.step()
    assert same(
        [optimizer.state[sharded]["master"].full_tensor()], [torch.full((4, 3), 5.0)]
    )


@pytest.mark.parametrize("update", [1, 4])
def test_a_sharded_model_with_gradients_can_be_moved(mesh, update):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", model=model)
    for _ in range(update):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    # Torch swaps the gradients, and refuses that while there are weak references.
    model.double()
    assert all(param.grad.dtype is torch.float64 for param in model.parameters())
