"""DTensors made of tensors that all ranks have, without any traffic."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


def local_of(tensor):
    """Return the piece that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    """Return the tensor, put together again."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut(tensor, mesh, placements):
    """Return a DTensor of a tensor that all ranks have."""
    local = tensor
    # A strided part is cut last, whatever the order of the axes.
    order = sorted(
        range(mesh.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard)
    )
    for axis in order:
        if not placements[axis].is_replicate():
            dim, count = placements[axis].dim, mesh.size(axis)
            size = -(-local.shape[dim] // count)
            begin = min(size * mesh.get_local_rank(axis), local.shape[dim])
            local = local.narrow(dim, begin, min(size, local.shape[dim] - begin))
    return DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def cut_like(tensor, param):
    """Return the tensor, cut as a parameter is; ordinary if that is."""
    if not isinstance(param, DTensor):
        return tensor.clone()
    return cut(tensor, param.device_mesh, param.placements)


def alike(params):
    """Return groups as torch's kernels take them: one mesh and one dtype each."""
    kinds = {}
    for param in params:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        kinds.setdefault((mesh, param.dtype), []).append(param)
    return [{"params": group} for group in kinds.values()]
