"""Cases of `test_join`: ranks under DDP that run out of data at different times."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from gradscale import ConfigError
from gradscale.torch import GradScaler, ShardedGradScaler
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.models import block
from tests.torch.parallel.norm_cases import batch
from tests.torch.training import INF

CASES = Cases()


def _epoch(model, optimizer, scaler, joining, batches):
    with Join(joining):
        for factor in batches:
            optimizer.zero_grad()
            loss = model(batch()).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def _facts(model, scaler):
    state = scaler.state_dict()
    return {
        "scale": state["scale"],
        "tracker": state["_growth_tracker"],
        "counts": [scaler.applied_steps, scaler.skipped_steps],
        "weights": [param.flatten().tolist() for param in model.parameters()],
    }


# The batches of each rank; a factor of inf is an overflow.
FIRST = [[1.0, INF, 1.0, 1.0, INF, 1.0, 1.0], [1.0, 1.0, 1.0]]
SECOND = [[1.0, 1.0], [1.0, 1.0, 1.0, INF]]


def _uneven(rank, joined, make, **how):
    model = DistributedDataParallel(block())
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2, **how)
    if make == "model":
        scaler = GradScaler("cpu", 8.0, growth_interval=2, model=model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    joining = [model, scaler] if joined else [model]
    seen = []
    for plan in (FIRST, SECOND):
        _epoch(model, optimizer, scaler, joining, plan[rank])
        seen.append(_facts(model, scaler))
    return seen


for _make in ("plain", "model"):
    for _guard in ("report", "raise"):

        @CASES.case(f"joined-{_make}-{_guard}")
        def _(rank, make=_make, guard=_guard):
            return _uneven(rank, True, make, guard=guard)


@CASES.case("not-joined")
def _(rank):
    return _uneven(rank, False, "plain")


@CASES.case("no-data-at-all")
def _(rank):
    model = DistributedDataParallel(block())
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2, model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _epoch(model, optimizer, scaler, [model, scaler], [1.0] * 3 * (1 - rank))
    return _facts(model, scaler)


@CASES.case("after-join")
def _(rank):
    """Losses are told again once all have joined."""
    model = DistributedDataParallel(block())
    scaler = GradScaler("cpu", 8.0, model=model, guard="raise", growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _epoch(model, optimizer, scaler, [model, scaler], [1.0] * (2 - rank))
    before = scaler.get_scale()
    scaler.scale(torch.full((), INF if rank else 0.0))
    for param in model.parameters():
        param.grad = torch.full_like(param, INF)
    scaler.step(optimizer)
    scaler.update()
    return before, scaler.get_scale()


@CASES.case("deciding-together")
def _(rank):
    model = DistributedDataParallel(block())
    told = []
    for scaler in (
        GradScaler("cpu", process_group=dist.group.WORLD),
        ShardedGradScaler("cpu"),
    ):
        try:
            Join([model, scaler])
        except ConfigError as error:
            told.append((error.code, str(error)))
    return told


@CASES.case("disabled")
def _(rank):
    model = DistributedDataParallel(block())
    scaler = GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _epoch(model, optimizer, scaler, [model, scaler], [1.0] * (2 - rank))
    return scaler.get_scale()
