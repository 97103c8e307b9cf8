"""Cases of `test_ranks`: retries, windows and several losses on two ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler, attempts, grads_finite
from tests.torch.loops.test_attempts import overflowing
from tests.torch.parallel.launch import Cases
from tests.torch.training import INF, NAN, parameter, planted

CASES = Cases()


def wrapped():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return DistributedDataParallel(net, broadcast_buffers=False)


@CASES.case("retry")
def _(rank):
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", model=model, init_scale=2.0**8)
    counts = []
    for number in range(4):
        # Rank 1 alone overflows, in the third batch.
        limit = 2.0**5 if rank and number == 2 else INF
        tries = 0
        for _ in attempts(scaler, model):
            tries += 1
            optimizer.zero_grad()
            loss = model(torch.full((4, 2), 1.0 + rank) + torch.rand(4, 2)).sum()
            scaler.scale(overflowing(loss, limit)).backward()
            scaler.step(optimizer)
            scaler.update()
        counts.append(tries)
    weights = [param.flatten().tolist() for param in model.parameters()]
    return {"counts": counts, "weights": weights, "scale": scaler.get_scale()}


@CASES.case("bad-loss-on-one-rank")
def _(rank):
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, tries = GradScaler("cpu", model=model), 0
    for _ in attempts(scaler, model):
        tries += 1
        optimizer.zero_grad()
        loss = model(torch.full((4, 2), NAN if rank else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"tries": tries, "applied": scaler.last.applied}


@CASES.case("window-without-sync")
def _(rank):
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", model=model, init_scale=8.0)
    seen = []
    for number in range(3):
        limit = 1.0 if rank and number == 1 else INF
        with model.no_sync():
            loss = model(torch.rand(4, 2) + number).sum()
            scaler.scale(overflowing(loss, limit)).backward()
        seen.append(grads_finite(scaler, optimizer))
        if not seen[-1]:
            break
    return {"seen": seen}


@CASES.case("losses-of-a-group")
def _(rank):
    # Each rank holds gradients of its own.
    scaler = GradScaler("cpu", process_group=dist.group.WORLD, init_scale=8.0)
    param = parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    for id, grad in (("a", 1.0), ("b", INF if rank else 1.0)):
        with scaler.loss(planted(param, grad), id=id) as scaled:
            scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    scales = scaler.loss_scale("a"), scaler.loss_scale("b")
    return {"scales": scales, "weights": param.tolist()}
