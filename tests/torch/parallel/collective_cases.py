"""Cases of `test_collectives`: what a step adds to the traffic between ranks."""

from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale import GradscaleError
from gradscale.torch import GradScaler
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.models import block, sharded, tensor_parallel, two_dimensional
from tests.torch.parallel.norm_cases import OPTIMIZERS, batch

CASES = Cases()
EXCHANGE = "c10d._allgather_base_"


class Traffic(TorchDispatchMode):
    """Counts the collectives that are called inside it, by their names."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count a collective; let a DTensor say first what it does."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        room, _, name = func._schema.name.partition("::")
        # Neither waiting for one nor wrapping what it returned is another.
        if "c10d" in room and "wait" not in name and "wrap" not in name:
            self.calls[f"{room}.{name}"] += 1
        return func(*args, **(kwargs or {}))


def _none(scaler, optimizer):
    pass


def _clip(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 0.01)


def _unscale_and_clip(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 0.01)


SPREADS = {
    "ddp": (lambda: DistributedDataParallel(block()), False),
    "fsdp2": (sharded, False),
    "tensor": (tensor_parallel, False),
    "two-dimensional": (two_dimensional, False),
    "given": (block, True),
}
FORMS = {"step": _none, "clip": _clip, "unscale-clip": _unscale_and_clip}


def _apart(model):
    """Return how many gradients are sums that the optimizer needs put together."""
    return sum(
        isinstance(param.grad, DTensor) and param.grad.placements != param.placements
        for param in model.parameters()
    )


def _counted(make_model, given, make, before):
    model = make_model()
    optimizer = make(model.parameters())
    group = dist.group.WORLD if given else None
    scaler = GradScaler("cpu", init_scale=2.0**10, process_group=group)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean()).backward()
        apart = _apart(model)
        with Traffic() as traffic:
            before(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.last.applied
        seen.append((apart, dict(traffic.calls)))
    return seen


def _enter():
    for spread, (model_of, given) in SPREADS.items():
        for name, make in OPTIMIZERS.items():
            for form, before in FORMS.items():

                @CASES.case(f"{spread}-{name}-{form}")
                def _(rank, of=model_of, given=given, make=make, before=before):
                    return _counted(of, given, make, before)


_enter()


@CASES.case("the-counter-counts")
def _(rank):
    mesh = init_device_mesh("cpu", (4,))
    with Traffic() as traffic:
        dist.all_reduce(torch.ones(1))
        dist.all_gather_into_tensor(torch.ones(4), torch.ones(1))
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]).redistribute(
            placements=[Replicate()]
        )
    return dict(traffic.calls)


@CASES.case("empty-and-missing-on-some-ranks")
def _(rank):
    # One rank has no elements at all, another no gradient: they ask as often as others.
    param = torch.nn.Parameter(torch.zeros(0 if rank == 1 else 3))
    other = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param, other], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10, process_group=dist.group.WORLD)
    loss = sum(p.sum() for p in (param, other)[: 1 if rank == 2 else 2])
    if rank != 3:
        scaler.scale(loss).backward()
    else:
        scaler.scale(torch.zeros(()))
    with Traffic() as traffic:
        norm = scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step(optimizer)
        scaler.update()
    return dict(traffic.calls), norm.item()


@CASES.case("refused-on-rank-1")
def _(rank):
    # The sums of the sequence-parallel layer come after what is refused.
    model = tensor_parallel()
    ours = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3)]
    optimizer = torch.optim.SGD([*ours, *model.parameters()], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(batch()).square().mean()).backward()
    memory = torch.ones(3)
    ours[0].grad = memory[:2] if rank == 1 else torch.ones(2)
    ours[1].grad = memory
    try:
        scaler.step(optimizer)
    except GradscaleError as error:
        return error.code
    return None


@CASES.case("a-write-in-between")
def _(rank):
    # A DTensor that was written to is read again, and all ranks agree again.
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(batch()).square().mean()).backward()
    scaler.unscale_(optimizer)
    before = scaler.clip_grad_norm_(optimizer, torch.inf).item()
    for param in model.parameters():
        param.grad.mul_(0.5)
    return before, scaler.clip_grad_norm_(optimizer, torch.inf).item()


@CASES.case("a-write-without-a-trace")
def _(rank):
    # Torch's clip of DTensors moves no version: bare parameters are always read.
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(batch()).square().mean()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125)
    return scaler.clip_grad_norm_(list(model.parameters()), torch.inf).item()
