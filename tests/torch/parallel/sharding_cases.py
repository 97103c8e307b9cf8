"""Cases of `test_sharding`: which ranks hold which gradients, on many meshes of four."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gradscale import ConfigError
from gradscale.torch.ranks.sharding import sharding_of
from tests.torch.parallel.launch import Cases

CASES = Cases()
WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def param(mesh=None, *placements):
    """Return a parameter on a mesh; an ordinary one without a mesh."""
    local = torch.zeros(2, 2)
    if mesh is not None:
        local = DTensor.from_local(local, mesh, placements, run_check=False)
    return torch.nn.Parameter(local)


def shown(params, given=None):
    """Return the ranks that decide together and the copies of each parameter."""
    try:
        sharding = sharding_of(params, given)
    except ConfigError as error:
        return {"code": error.code, "text": str(error)}
    if sharding is None:
        return "alone"
    ranks = sorted(dist.get_process_group_ranks(sharding.group))
    return ranks, [sharding.copies.get(id(param)) for param in params]


def grid(*shape, names=("data", "tensor")):
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@CASES.case("ordinary")
def _(rank):
    return shown([param(), param()])


@CASES.case("ordinary-given")
def _(rank):
    return shown([param(), param()], dist.group.WORLD)


@CASES.case("one-axis")
def _(rank):
    mesh = grid(4, names=("data",))
    return shown([param(mesh, ROWS), param(mesh, WHOLE), param()])


@CASES.case("two-axes")
def _(rank):
    return shown(_all_placements(grid(2, 2)))


@CASES.case("without-names")
def _(rank):
    return shown(_all_placements(init_device_mesh("cpu", (2, 2))))


def _all_placements(mesh):
    return [
        param(mesh, WHOLE, WHOLE),
        param(mesh, ROWS, WHOLE),
        param(mesh, WHOLE, COLUMNS),
        param(mesh, ROWS, COLUMNS),
        param(mesh, _StridedShard(0, split_factor=2), ROWS),
        param(),
    ]


@CASES.case("two-axes-apart")
def _(rank):
    mesh = grid(2, 2)
    data, tensor = mesh["data"], mesh["tensor"]
    return shown([param(data, ROWS), param(tensor, ROWS), param(data, WHOLE), param()])


@CASES.case("axis-of-one")
def _(rank):
    mesh = grid(4, 1)
    return shown([param(mesh, ROWS, ROWS), param(mesh["tensor"], ROWS), param()])


@CASES.case("pipeline")
def _(rank):
    mesh = grid(2, 2, names=("stage", "tensor"))["tensor"]
    return shown([param(mesh, ROWS), param(mesh, WHOLE), param()])


@CASES.case("pipeline-inside")
def _(rank):
    mesh = grid(2, 2, names=("tensor", "stage"))["tensor"]
    return shown([param(mesh, ROWS), param(mesh, WHOLE), param()])


@CASES.case("flattened")
def _(rank):
    mesh = grid(2, 2)
    flat = mesh["data", "tensor"]._flatten("both")
    return shown([param(flat, ROWS), param(flat, WHOLE), param(mesh["data"], ROWS)])


@CASES.case("flattened-in-a-pipeline")
def _(rank):
    mesh = grid(2, 2, 1, names=("stage", "data", "context"))
    flat = mesh["data", "context"]._flatten("both")
    return shown([param(flat, ROWS), param(flat, WHOLE), param()])


@CASES.case("unflattened")
def _(rank):
    # The root is a line of four, whatever is made of it.
    mesh = grid(4, names=("world",))._unflatten(0, (2, 2), ("stage", "tensor"))
    mesh = mesh["tensor"]
    return shown([param(mesh, ROWS), param(mesh, WHOLE), param()])


@CASES.case("in-another-order")
def _(rank):
    order = [[3, 1], [2, 0]]
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("stage", "tensor"))["tensor"]
    return shown([param(mesh, ROWS), param(mesh, WHOLE), param()])


@CASES.case("equal-meshes")
def _(rank):
    one, other = grid(4, names=("data",)), grid(4, names=("data",))
    return shown([param(one, ROWS), param(other, WHOLE), param()])


@CASES.case("two-roots")
def _(rank):
    line, tensor = grid(4, names=("world",)), grid(2, 2)["tensor"]
    return shown([param(line, ROWS), param(tensor, ROWS), param()])


def _pairs(*shape):
    """Return, of two meshes of two ranks each, the one of this rank."""
    ranks = torch.arange(4).view(2, *shape)
    return [DeviceMesh("cpu", pair) for pair in ranks][dist.get_rank() // 2]


@CASES.case("half-of-the-world")
def _(rank):
    mesh = _pairs(2)
    return shown([param(mesh, ROWS), param(mesh, WHOLE), param()])


@CASES.case("half-of-the-world-in-two-axes")
def _(rank):
    return shown([param(_pairs(2, 1), ROWS, WHOLE)])


@CASES.case("half-of-the-world-in-two-axes-given")
def _(rank):
    mesh = _pairs(2, 1)
    params = [param(mesh, ROWS, WHOLE), param(mesh, WHOLE, WHOLE), param()]
    return shown(params, dist.group.WORLD)


@CASES.case("two-meshes-of-which-one-is-half")
def _(rank):
    return shown([param(grid(4, names=("data",)), ROWS), param(_pairs(2), ROWS)])


@CASES.case("given-one-axis")
def _(rank):
    mesh = grid(2, 2)
    return shown(_all_placements(mesh), mesh.get_group("data"))


@CASES.case("given-all-of-a-line")
def _(rank):
    mesh = grid(4, names=("data",))
    return shown([param(mesh, ROWS), param(mesh, WHOLE), param()], dist.group.WORLD)


@CASES.case("given-without-some-ranks")
def _(rank):
    return shown([param()], dist.new_group([0, 2]))


@CASES.case("fsdp1")
def _(rank):
    seen = []
    for original in (False, True):
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 4),
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        seen.append(shown(list(model.parameters())))
    return seen
