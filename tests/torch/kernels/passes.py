"""What the tests of the passes step on: lists of tensors, settings, comparisons."""

from typing import Any

import torch
from torch import Tensor

from gradscale.torch.kernels import optimizer_pass as updating
from gradscale.torch.kernels import plain as reference
from gradscale.torch.kernels.args import (
    CHUNK,
    AdamConfig,
    AdamLists,
    AmpArgs,
    LionConfig,
    MomentumLists,
    SgdConfig,
)
from gradscale.torch.kernels.grad_reader import GradReader
from gradscale.torch.kernels.plain import TensorStats
from gradscale.torch.kernels.pointer_table import PointerTable
from gradscale.torch.tensor_list import numbers

# Around the chunk of 1024, and what is left of a vector of 16 bytes.
SIZES = (1, 5, 1024, 1025, 2050)

ADAM = AdamConfig(0.01, 0.9, 0.999, 1e-8, 0.0, decoupled=True, maximize=False)
SGD = SgdConfig(0.01, 0.0, 0.0, 0.0, nesterov=False, maximize=False)
LION = LionConfig(0.01, 0.9, 0.99, 0.0, maximize=False)

# How far from the reference a value may lie, relative to the largest of its tensor:
# a pass has a dozen roundings of 2**-24, and three passes are taken.
CLOSE = 2.0**-18

Lists = AdamLists | MomentumLists


def values(sizes: Any, device: torch.device, *, seed: int = 1) -> list[Tensor]:
    """Return f32 tensors of these shapes, the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


def adam_lists(
    device: torch.device,
    *,
    sizes: Any = SIZES,
    param: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    amsgrad: bool = False,
) -> AdamLists:
    """Return lists as a new optimizer would have them; masters where needed."""
    exact = values(sizes, device)
    steps = torch.zeros(len(sizes), device=device)
    return AdamLists(
        params=[p.to(param, copy=True) for p in exact],
        grads=[g.to(grad) for g in values(sizes, device, seed=2)],
        exp_avgs=[torch.zeros_like(p) for p in exact],
        exp_avg_sqs=[torch.zeros_like(p) for p in exact],
        max_exp_avg_sqs=[torch.zeros_like(p) for p in exact] if amsgrad else [],
        masters=[] if param is torch.float32 else exact,
        steps=list(steps.unbind()),
    )


def momentum_lists(
    device: torch.device,
    *,
    sizes: Any = SIZES,
    param: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    momenta: bool = True,
    steps: bool = False,
) -> MomentumLists:
    """Return lists as a new optimizer would have them; masters where needed."""
    exact = values(sizes, device)
    counts = torch.zeros(len(sizes), device=device)
    return MomentumLists(
        params=[p.to(param, copy=True) for p in exact],
        grads=[g.to(grad) for g in values(sizes, device, seed=2)],
        momenta=[torch.zeros_like(p) for p in exact] if momenta else [],
        masters=[] if param is torch.float32 else exact,
        steps=list(counts.unbind()) if steps else [],
    )


def copied(lists: Lists) -> Lists:
    """Return copies that share no memory, each with the strides of its original."""
    return type(lists)(*([_copy(t) for t in column] for column in lists))


def _copy(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor.clone()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.storage_offset()
    room = torch.zeros(offset + last + 1, dtype=tensor.dtype, device=tensor.device)
    here = room.as_strided(tensor.shape, tensor.stride(), offset)
    return here.copy_(tensor)


def handed(
    device: torch.device,
    scale: float | None = None,
    found: float | None = None,
    write_back: bool = False,
) -> AmpArgs:
    """Return what a scaler hands over."""
    made = [
        None if x is None else torch.tensor(x, device=device) for x in (scale, found)
    ]
    return AmpArgs(made[0], made[1], write_back)


def table_for(device: torch.device) -> PointerTable:
    """Return the table that an optimizer would keep."""
    return PointerTable(device, CHUNK)


def launched(
    lists: Lists, how: Any, given: AmpArgs, table: PointerTable | None = None
) -> None:
    """Take one step by kernels where they can."""
    layout = updating.kernel_layout(lists, "triton")
    table = table_for(lists.params[0].device) if table is None else table
    if isinstance(lists, AdamLists):
        updating.adam_(lists, how, given, layout, table)
    elif isinstance(how, LionConfig):
        updating.lion_(lists, how, given, layout, table)
    else:
        updating.sgd_(lists, how, given, layout, table)


def computed(lists: Lists, how: Any, given: AmpArgs) -> None:
    """Take the same step by the reference."""
    if isinstance(lists, AdamLists):
        reference.adam_(lists, how, given)
    elif isinstance(how, LionConfig):
        reference.lion_(lists, how, given)
    else:
        reference.sgd_(lists, how, given)


def fresh_grads_(*many: Lists, seed: int) -> None:
    """Write the same new gradients into all of the lists."""
    shapes = [g.shape for g in many[0].grads]
    for lists in many:
        for grad, new in zip(
            lists.grads, values(shapes, lists.grads[0].device, seed=seed), strict=True
        ):
            grad.copy_(new)


def three_steps(
    lists: Lists, how: Any, scale: float | None = 8.0
) -> tuple[Lists, Lists]:
    """Return the lists after three steps by kernels, and by the reference."""
    ours, theirs = copied(lists), copied(lists)
    table = table_for(lists.params[0].device)
    given = handed(lists.params[0].device, scale, 0.0)
    for step in range(3):
        fresh_grads_(ours, theirs, seed=10 + step)
        launched(ours, how, given, table)
        computed(theirs, how, given)
    return ours, theirs


def assert_close(ours: Lists, theirs: Lists) -> None:
    """Compare every tensor of the lists; gradients and counts must be equal."""
    for name, mine, other in zip(ours._fields, ours, theirs, strict=True):
        assert len(mine) == len(other)
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert a.dtype is b.dtype, name
            if name in ("grads", "steps"):
                assert torch.equal(bits(a), bits(b)), f"{name}[{i}]"
            else:
                _assert_near(a, b, f"{name}[{i}]")


def _assert_near(mine: Tensor, other: Tensor, what: str) -> None:
    if mine.numel() == 0:
        return
    # One step of the dtype, for a master that lies next to the border of two; the
    # interpreter does not round to bf16, it cuts off.
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(mine.dtype, CLOSE)
    room = step * other.abs().amax().double()
    apart = (mine.double() - other.double()).abs().amax()
    assert apart <= room, f"{what}: {apart.item()} > {room.item()}"


def bits(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor's elements, in the order of its indices."""
    return (
        tensor.detach()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
    )


def all_bits(lists: Lists) -> list[list[int]]:
    """Return every bit of the lists."""
    return [bits(t).tolist() for column in lists for t in column]


def read_by(reader: GradReader, tensors: list[Tensor]) -> TensorStats:
    """Return the statistics that a reader makes of tensors of one kind."""
    kind = tensors[0].device, tensors[0].dtype
    numels = numbers(map(Tensor.numel, tensors))
    stats, _ = reader.read(
        tensors, kind, None, numels, torch.ones((), device=kind[0]), None
    )
    return stats
