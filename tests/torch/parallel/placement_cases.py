"""Cases of `test_placements`: gradients that lie anyhow, one of them not finite.

Each case is drawn from a seed that all ranks share, so that they build the same list of
parameters; what a rank holds of it follows from its place in the meshes.
"""

import math
import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gradscale.torch import GradScaler, optim
from tests.torch.parallel.cutting import alike, cut, local_of
from tests.torch.parallel.launch import Cases

CASES = Cases()
# Of each optimizer, so many with a bad element and so many without: each bad value
# once with and without a clip and a call of `unscale_`.
DRAWS = 12
SCALE = 2.0**6
# Uneven over 2 and over 4 ranks, and too few for some of them.
SHAPES = [(5, 3), (4, 4), (1, 6), (7, 2), (3, 1), (2, 8)]
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(alike(params), lr=0.1, foreach=True),
    "loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "fused": lambda params: torch.optim.AdamW(alike(params), lr=0.1, fused=True),
    "own-adamw": lambda params: optim.AdamW(params, lr=0.1),
    "own-sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "own-lion": lambda params: optim.Lion(params, lr=0.1),
}


class Meshes:
    """All meshes that a draw may use, made once."""

    def __init__(self):
        names = ("data", "tensor")
        self.grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        self.flat = self.grid["data", "tensor"]._flatten("both")
        self.joining = [self.grid, self.flat]
        self.parts = [self.grid["data"], self.grid["tensor"]]

    def draw(self, draw, first):
        """Return the mesh and the placements of a parameter.

        The first one joins all ranks. Without it, the ranks beyond an axis that no
        parameter has would be taken for another stage of a pipeline.
        """
        mesh = draw.choice(self.joining if first else self.joining + self.parts)
        one = [Replicate(), Shard(0), Shard(1)]
        if mesh is not self.grid:
            return mesh, [draw.choice(one)]
        # As FSDP2 cuts what tensor parallelism has cut along the same axis.
        strided = [_StridedShard(0, split_factor=2), Shard(0)]
        return mesh, draw.choice([strided, [draw.choice(one), draw.choice(one)]])


class Drawn:
    """One list of parameters with gradients, as a seed has it.

    Attributes:
        params: On this rank.
        squares: Of all elements of all gradients, each once.
    """

    def __init__(self, seed, meshes, bad):
        self._draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.params = []
        self.squares = 0.0
        count = self._draw.randint(1, 6)
        culprit = self._draw.randrange(count)
        lonely = self._draw.randrange(4)
        for number in range(count):
            shape, dtype = self._draw.choice(SHAPES), self._draw.choice(DTYPES)
            missing = number != culprit and self._draw.random() < 0.15
            value = torch.randn(shape, generator=generator).to(dtype)
            grad = (torch.randn(shape, generator=generator) * SCALE).to(dtype)
            ordinary = number > 0 and self._draw.random() < 0.25
            mesh, placements = meshes.draw(self._draw, first=number == 0)
            if ordinary:
                param, mine = torch.nn.Parameter(value), grad.clone()
            else:
                param = torch.nn.Parameter(cut(value, mesh, placements))
                mine = cut(grad, mesh, placements)
            self.params.append(param)
            if missing:
                continue
            param.grad = mine
            self.squares += float((grad.double() / SCALE).square().sum())
            if number != culprit and placements == [Shard(0)] and not ordinary:
                self._drop(param, mesh)
            if bad is not None and number == culprit:
                self._spoil(mine, lonely, bad)

    def _drop(self, param, mesh):
        """Leave one rank without its piece of a gradient that no other rank has."""
        left = self._draw.randrange(8)
        if mesh.size() < 4 or left >= 4:
            return
        pieces = [0.0] * 4
        mine = (param.grad.to_local().double() / SCALE).square().sum().item()
        dist.all_gather_object(pieces, mine)
        self.squares -= pieces[left]
        if dist.get_rank() == left:
            param.grad = None

    def _spoil(self, grad, lonely, bad):
        """Put one bad element on one rank alone, whichever has elements there."""
        local = local_of(grad)
        sizes = [0] * 4
        dist.all_gather_object(sizes, local.numel())
        able = [rank for rank in range(4) if sizes[rank]]
        place = self._draw.randrange(2**16)
        if dist.get_rank() == able[lonely % len(able)]:
            local.view(-1)[place % local.numel()] = bad


def stepped(params, make, clip=True, unscale=False, group=None):
    """Step once; return what became of it and of what this rank holds."""
    optimizer = make(params)
    scaler = GradScaler(
        "cpu", init_scale=SCALE, allow_fp16=True, process_group=group, growth_interval=1
    )
    held = [local_of(param.detach()) for param in params if param.grad is not None]
    before = [weight.clone() for weight in held]
    scaler.scale(torch.zeros(()))
    if unscale:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item() if clip else None
    scaler.step(optimizer)
    scaler.update()
    pairs = list(zip(before, held, strict=True))
    # A step of a tenth is too small for some f16 and bf16 weights, not for all.
    moved = [not torch.equal(a, b) for a, b in pairs if b.numel()]
    return {
        "applied": scaler.last.applied,
        "scale": scaler.get_scale(),
        "norm": norm,
        "moved": any(moved),
        "has": bool(moved),
    }


def _run(name, make, bad):
    """Run every draw with this optimizer; return what was seen of each."""
    if not _MESHES:
        _MESHES.append(Meshes())
    seen = []
    for number in range(DRAWS):
        seed = 1000 * list(OPTIMIZERS).index(name) + number
        word = (math.inf, -math.inf, math.nan)[number % 3] if bad else None
        drawn = Drawn(seed, _MESHES[0], word)
        clip, unscale = bool(number & 1), bool(number & 2)
        one = stepped(drawn.params, make, clip, unscale)
        seen.append(one | {"norm_of_whole": math.sqrt(drawn.squares)})
    return seen


_MESHES: list[Meshes] = []


def _enter():
    for name, make in OPTIMIZERS.items():
        for word, bad in (("bad", True), ("finite", False)):

            @CASES.case(f"{name}-{word}")
            def _(rank, name=name, make=make, bad=bad):
                return _run(name, make, bad)


_enter()


def _plant(shapes, seed, bad=None):
    """Return ordinary parameters with gradients, and the sum of their squares."""
    generator = torch.Generator().manual_seed(seed)
    params, squares = [], 0.0
    for shape in shapes:
        grad = torch.randn(shape, generator=generator) * SCALE
        param = torch.nn.Parameter(torch.randn(shape, generator=generator))
        param.grad = grad.clone()
        params.append(param)
        squares += float((grad.double() / SCALE).square().sum())
    if bad is not None:
        params[-1].grad.view(-1)[0] = bad
    return params, squares


def _in_stages(rank, make, bad_rank, group, ranks):
    """Step a pipeline: each rank has parameters of its own, and not equally many."""
    shapes = {stage: [(3, stage + 1)] * (stage + 1) for stage in range(4)}
    bad = math.inf if rank == bad_rank else None
    mine, _ = _plant(shapes[rank], rank, bad)
    squares = sum(_plant(shapes[other], other)[1] for other in ranks)
    return stepped(mine, make, group=group) | {"norm_of_whole": math.sqrt(squares)}


def _in_stages_and_cut(rank, make, bad_rank, given):
    """Step a pipeline of two stages, each of them cut by tensor parallelism."""
    names = ("stage", "tensor")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    total = 0.0
    for stage in range(2):
        shapes = [(4, 3 + stage), (5, 2), (3, 3)]
        wholes, squares = _plant(shapes, 10 + stage)
        total += squares
        if stage == rank // 2:
            mine = [
                _cut_both(param, mesh["tensor"], placement)
                for param, placement in zip(
                    wholes, (Shard(0), Replicate(), None), strict=True
                )
            ]
    if rank == bad_rank:
        local_of(mine[0].grad)[0] = math.nan
    group = dist.group.WORLD if given else None
    return stepped(mine, make, group=group) | {"norm_of_whole": math.sqrt(total)}


def _cut_both(param, mesh, placement):
    if placement is None:
        return param
    made = torch.nn.Parameter(cut(param.detach(), mesh, [placement]))
    made.grad = cut(param.grad, mesh, [placement])
    return made


# One of each way to step: the ranks that decide do not depend on more.
IN_STAGES = ("sgd", "fused", "own-adamw")


def _enter_stages():
    for name in IN_STAGES:
        make = OPTIMIZERS[name]
        for bad_rank in (None, 0, 3):

            @CASES.case(f"stages-{name}-{bad_rank}")
            def _(rank, make=make, bad_rank=bad_rank):
                return _in_stages(rank, make, bad_rank, dist.group.WORLD, range(4))

            @CASES.case(f"pairs-{name}-{bad_rank}")
            def _(rank, make=make, bad_rank=bad_rank):
                pairs = [[0, 2], [1, 3]]
                groups = [dist.new_group(pair) for pair in pairs]
                mine = rank % 2
                return _in_stages(rank, make, bad_rank, groups[mine], pairs[mine])

            for given in (False, True):

                @CASES.case(f"cut-stages-{name}-{bad_rank}-{given}")
                def _(rank, make=make, bad_rank=bad_rank, given=given):
                    return _in_stages_and_cut(rank, make, bad_rank, given)


_enter_stages()
