"""Sharding: the ranks that hold an optimizer's gradients, and the copies of each."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import ConfigError

# The attribute of parameters that FSDP1 has sharded.
_FLATTENED = "_fsdp_flattened"


class Sharding(NamedTuple):
    """How the gradients of an optimizer are sharded over ranks.

    Attributes:
        group: The ranks that decide together.
        copies: By the id of a parameter, how many of these ranks hold the same
            elements of its gradient. Other parameters have different elements on each
            rank.
    """

    group: Any
    copies: dict[int, float]


def sharding_of(params: Sequence[Any], given: Any = None) -> Sharding | None:
    """Return how the gradients of `params` are sharded; None if they are not.

    DTensors have a mesh, and FSDP1 marks its parameters. Ordinary parameters of an
    optimizer that also has sharded ones are copies of one another. Otherwise each rank
    of a given group has its own; without a group each rank decides alone, because DDP
    has reduced their gradients.

    Args:
        params: All parameters of an optimizer, with a gradient or without.
        given: The group to decide in, regardless of the parameters; or None.

    Raises:
        ConfigError: The parameters determine no usable group, or this rank is not in
            the given group.
    """
    if given is not None and torch.distributed.get_rank(given) < 0:
        raise ConfigError(
            f"process_group= does not contain rank {torch.distributed.get_rank()}. It "
            "could not take part in the exchange. Pass a group with this rank in it, "
            "or None if this rank decides alone.",
            code="GS111",
        )
    sharded = [param for param in params if _has_mesh(param)]
    if not sharded:
        flattened = any(_FLATTENED in param.__dict__ for param in params)
        if given is None and flattened:
            given = torch.distributed.group.WORLD
        if given is None:
            return None
        whole = [p for p in params if _is_whole(p)] if flattened else []
        ranks = float(torch.distributed.get_world_size(given))
        return Sharding(given, dict.fromkeys(map(id, whole), ranks))
    alike = {mesh: _alike(mesh) for mesh in {param.device_mesh for param in sharded}}
    group = _group_of({_root_of(mesh) for mesh in alike}) if given is None else given
    inside = torch.distributed.get_process_group_ranks(group)
    joined = _joined([mesh for meshes in alike.values() for mesh in meshes])
    joined.intersection_update(inside)
    copies = {id(param): float(len(joined)) for param in params}
    counted: dict[Any, float] = {}
    for param in sharded:
        mesh, cut = key = param.device_mesh, _cut(param)
        if key not in counted:
            counted[key] = float(_holders(alike[mesh], mesh.shape, cut, joined))
        copies[id(param)] = counted[key]
    return Sharding(group, copies)


def is_distributed() -> bool:
    """Return whether torch.distributed is initialized."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def is_single_process() -> bool:
    """Return whether this process is the only one."""
    return not is_distributed() or torch.distributed.get_world_size() == 1


def replicas_of(model: Any) -> Any:
    """Return the group over which DDP reduces the gradients of a model, or None."""
    if torch.distributed.is_available():
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(model, DistributedDataParallel):
            return model.process_group
    return None


def _is_whole(param: Any) -> bool:
    """Return whether each rank has the whole parameter under FSDP1."""
    # FSDP1 ignores some parameters, and shards none with NO_SHARD.
    size = getattr(param, "_unpadded_unsharded_size", None)
    return _FLATTENED not in param.__dict__ or param.shape == size


def _has_mesh(param: Any) -> bool:
    # hasattr() for a missing attribute of a Tensor takes a microsecond.
    ordinary = type(param) in (Tensor, torch.nn.Parameter)
    return not ordinary and hasattr(param, "device_mesh")


def _root_of(mesh: Any) -> Any:
    """Return the mesh of which this one is a part."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is None:
        # Older versions of torch keep a table of them.
        from torch.distributed import device_mesh

        return device_mesh._mesh_resources.get_root_mesh(mesh)
    return find()


def _cut(param: Any) -> tuple[int, ...]:
    """Return the axes of its mesh along which a DTensor is sharded."""
    return tuple(
        axis
        for axis, placement in enumerate(param.placements)
        if not (placement.is_replicate() or placement.is_partial())
    )


def _alike(mesh: Any) -> list[list[int]]:
    """Return the ranks of all meshes that divide the root in the same way as this one.

    In a root of 2 x 3 ranks, a mesh of its second axis is {0, 1, 2} for half of the
    ranks and {3, 4, 5} for the others. Each is in the order of its own axes.
    """
    ranks = _root_of(mesh).mesh.flatten().tolist()
    place_of = {rank: place for place, rank in enumerate(ranks)}
    places = [place_of[rank] for rank in mesh.mesh.flatten().tolist()]
    offsets = [place - min(places) for place in places]
    meshes: list[list[int]] = []
    known: set[int] = set()
    for first in range(len(ranks)):
        # The first place in none of the meshes is the first place of another mesh.
        if first not in known:
            there = [first + offset for offset in offsets]
            known.update(there)
            meshes.append([ranks[place] for place in there])
    return meshes


def _joined(meshes: Sequence[Sequence[int]]) -> set[int]:
    """Return the ranks that this one is connected to, by one mesh or through several.

    An axis of the root that no mesh has, such as that of pipeline stages, connects no
    ranks: other positions on it hold other parameters.
    """
    joined: set[int] = set()
    more = {torch.distributed.get_rank()}
    while more - joined:
        joined |= more
        more = {r for mesh in meshes if not joined.isdisjoint(mesh) for r in mesh}
    return joined


def _holders(
    meshes: Sequence[Sequence[int]],
    shape: Sequence[int],
    cut: Sequence[int],
    among: set[int],
) -> int:
    """Return how many of some ranks hold the same part as this one.

    Args:
        meshes: As `_alike` returns them.
        shape: The shape of each mesh.
        cut: The axes along which the parts differ.
        among: The ranks to count.
    """
    parts = [tuple(at[axis] for axis in cut) for at in product(*map(range, shape))]
    part_of = {
        rank: part for mesh in meshes for rank, part in zip(mesh, parts, strict=True)
    }
    mine = part_of.get(torch.distributed.get_rank())
    return max(1, sum(part_of.get(rank) == mine for rank in among))


def _group_of(roots: set[Any]) -> Any:
    """Return the group of all ranks of a mesh."""
    if len(roots) == 1:
        (root,) = roots
        if root.ndim == 1:
            return root.get_group()
    if all(root.size() == torch.distributed.get_world_size() for root in roots):
        return torch.distributed.group.WORLD
    shapes = ", ".join(sorted(str(root) for root in roots))
    raise ConfigError(
        f"The parameters of one optimizer lie on {shapes}, for which there is no one "
        "process group. Without it the ranks would decide apart. Pass process_group= "
        "with all ranks that step together.",
        code="GS111",
    )
