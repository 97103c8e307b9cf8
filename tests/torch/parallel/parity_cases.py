"""Cases of `test_parity`: steps in parallel, and the same in one process."""

import random
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler, optim
from tests.torch.parallel.cutting import alike, whole
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.models import (
    WIDTH,
    block,
    sharded,
    tensor_parallel,
    two_dimensional,
)

CASES = Cases()
STEPS = 24
ROWS, POSITIONS = 4, 4


def _replicated():
    return DistributedDataParallel(block())


def _hybrid():
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return fully_shard(block(), mesh=mesh)


def _offloaded():
    # There is nothing to pin where the parameters are on the host anyway.
    return fully_shard(block(), offload_policy=CPUOffloadPolicy(pin_memory=False))


SPREADS = {
    "ddp": _replicated,
    "fsdp2": sharded,
    "tensor": tensor_parallel,
    "two-dimensional": two_dimensional,
    "hybrid": _hybrid,
    "offloaded": _offloaded,
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(alike(params), lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(alike(params), lr=0.01, fused=True),
    "own-adamw": lambda params: optim.AdamW(params, lr=0.01),
    "own-sgd": lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
    "own-lion": lambda params: optim.Lion(params, lr=0.001),
}


def _no_clip(scaler, optimizer, params):
    pass


def _clip(scaler, optimizer, params):
    scaler.clip_grad_norm_(optimizer, 0.5)


def _clip_by_torch(scaler, optimizer, params):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 0.5)


CLIPS = {"none": _no_clip, "scaler": _clip, "torch": _clip_by_torch}
# Torch's own clip takes no mixture of DTensors and others, nor of meshes.
ON_TWO = [
    ("ddp", "sgd", "torch"),
    ("ddp", "fused", "scaler"),
    ("ddp", "own-adamw", "scaler"),
    *(("fsdp2", optimizer, "scaler") for optimizer in OPTIMIZERS),
    ("fsdp2", "sgd", "torch"),
    ("fsdp2", "own-adamw", "none"),
    *(("tensor", optimizer, "scaler") for optimizer in ("sgd", "fused", "own-adamw")),
    ("offloaded", "sgd", "scaler"),
]
ON_FOUR = [
    ("two-dimensional", "sgd", "scaler"),
    ("two-dimensional", "fused", "scaler"),
    ("two-dimensional", "own-adamw", "scaler"),
    ("hybrid", "own-sgd", "scaler"),
    ("hybrid", "sgd", "torch"),
]


def bad_rows():
    """Return, for each step, the row whose input is not finite, or None."""
    draw = random.Random(5)
    return [
        draw.randrange(ROWS) if draw.random() < 0.15 else None for _ in range(STEPS)
    ]


def inputs(step, bad_row):
    """Return f32[ROWS, POSITIONS, WIDTH], the same in every process."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator)
    if bad_row is not None:
        x[bad_row, step % POSITIONS, step % WIDTH] = torch.inf
    return x


def run(model, make, clip, part=0, parts=1):
    """Train on one of so many parts of the rows; return what became of each step."""
    params = list(model.parameters())
    optimizer = make(params)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    scales, applied = [], []
    for step, bad_row in enumerate(bad_rows()):
        optimizer.zero_grad()
        mine = inputs(step, bad_row).chunk(parts)[part]
        scaler.scale(model(mine).square().mean()).backward()
        clip(scaler, optimizer, params)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        applied.append(scaler.last.applied)
    weights = [whole(param.detach()).flatten().tolist() for param in params]
    return {"scales": scales, "applied": applied, "weights": weights}


@cache
def alone(optimizer, clip):
    """Return what becomes of the steps in one process."""
    return run(block(), OPTIMIZERS[optimizer], CLIPS[clip])


def _parts(spread):
    """Return over how many ranks the data are."""
    if spread == "tensor":
        return 1
    return 2 if spread == "two-dimensional" else dist.get_world_size()


def enter(cases, combinations):
    """Enter a case for each combination."""
    for spread, optimizer, clip in combinations:

        @cases.case(f"{spread}-{optimizer}-{clip}")
        def _(rank, spread=spread, make=OPTIMIZERS[optimizer], clip=CLIPS[clip]):
            parts = _parts(spread)
            # Ranks of one part stand side by side.
            part = rank * parts // dist.get_world_size()
            return run(SPREADS[spread](), make, clip, part, parts)


enter(CASES, ON_TWO)
