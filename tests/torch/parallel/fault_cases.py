"""Cases of `test_faults`: one rank of two is unlucky, and guards that all obey."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradscale import ScaleCollapsed
from gradscale.torch import GradScaler, ShardedGradScaler, optim
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.models import block, sharded
from tests.torch.parallel.norm_cases import batch
from tests.torch.training import INF, NAN, parameter, planted

CASES = Cases()
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "own": lambda params: optim.AdamW(params, lr=0.1),
}
SGD = OPTIMIZERS["sgd"]


def local(tensor):
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def overflows(model):
    """Spoil the gradients that this rank holds."""
    for param in model.parameters():
        local(param.grad).fill_(INF)


def has_fewer(model):
    """Drop some gradients of this rank."""
    for param in list(model.parameters())[::2]:
        param.grad = None


def has_none(model):
    """Drop all gradients of this rank."""
    for param in model.parameters():
        param.grad = None


def is_slow(model):
    """Keep the others waiting."""
    time.sleep(2.0)


# What happens to rank 1 between backward and step, and whether all then skip.
FAULTS = {
    "overflows": (overflows, True),
    "has-fewer": (has_fewer, False),
    "has-none": (has_none, False),
    "is-slow": (is_slow, False),
}


def _weights(model):
    return [local(param.detach()).flatten().tolist() for param in model.parameters()]


def _facts(scaler):
    last = scaler.last
    return last.applied, scaler.get_scale(), str(last.verdict), last.step


def _steps(model, optimizer, scaler, rank, plan):
    """Run a step for each entry: what befalls rank 1, or None."""
    seen = []
    for fault in plan:
        optimizer.zero_grad()
        data = batch() * (NAN if fault == "nan" and rank == 1 else 1.0)
        scaler.scale(model(data).square().mean()).backward()
        if rank == 1 and callable(fault):
            fault(model)
        before = _weights(model)
        scaler.step(optimizer)
        scaler.update()
        seen.append((*_facts(scaler), _weights(model) == before))
    return seen


def _enter_faults():
    for name, make in OPTIMIZERS.items():
        for word, (fault, _) in FAULTS.items():
            if word == "is-slow" and name != "sgd":
                continue

            @CASES.case(f"{word}-{name}")
            def _(rank, make=make, fault=fault):
                model, scaler = sharded(), GradScaler("cpu", init_scale=8.0)
                optimizer = make(model.parameters())
                seen = _steps(model, optimizer, scaler, rank, [None, fault, None])
                return seen, scaler.skipped_steps

        @CASES.case(f"nan-data-{name}")
        def _(rank, make=make):
            model, scaler = sharded(), GradScaler("cpu", init_scale=8.0)
            optimizer = make(model.parameters())
            seen = _steps(model, optimizer, scaler, rank, [None, "nan", None])
            return seen, scaler.skipped_steps

        @CASES.case(f"collapse-{name}")
        def _(rank, make=make):
            model, scaler = sharded(), GradScaler("cpu", init_scale=2.0**-24)
            optimizer = make(model.parameters())
            before = _weights(model)
            for count in range(9):
                try:
                    _steps(model, optimizer, scaler, rank, [overflows])
                except ScaleCollapsed as error:
                    untouched = _weights(model) == before
                    return {"count": count, "code": error.code, "untouched": untouched}
            return None


_enter_faults()


class Ordinary(nn.Module):
    """A model that each rank has for itself."""

    def __init__(self):
        super().__init__()
        self.inner = block()

    def forward(self, x):
        """Return what the block returns."""
        return self.inner(x)


def by_fsdp2(**how):
    """Return a model cut by FSDP2, and a scaler that finds the ranks itself."""
    return sharded(), GradScaler("cpu", **how)


def by_group(**how):
    """Return an ordinary model, and a scaler that is told the ranks."""
    return Ordinary(), GradScaler("cpu", process_group=dist.group.WORLD, **how)


def by_ddp(**how):
    """Return a model under DDP, and a scaler that knows it."""
    model = DistributedDataParallel(block())
    return model, GradScaler("cpu", model=model, **how)


def by_bare_ddp(**how):
    """Return a model under DDP, and a scaler that knows nothing of it."""
    return DistributedDataParallel(block()), GradScaler("cpu", **how)


def by_sharded_scaler(**how):
    """Return an ordinary model, and FSDP1's scaler."""
    return Ordinary(), ShardedGradScaler("cpu", **how)


WAYS = {
    "fsdp2": by_fsdp2,
    "group": by_group,
    "ddp": by_ddp,
    "bare-ddp": by_bare_ddp,
    "sharded-scaler": by_sharded_scaler,
}


# Torch 2.11 has the older name alone.
GATHER = next(
    name
    for name in ("all_gather_single", "all_gather_into_tensor")
    if hasattr(dist, name)
)


class Exchanges:
    """Counts the all-gathers of the scaler while it is entered."""

    def __enter__(self):
        self.count, self._real = 0, getattr(dist, GATHER)

        def counted(*args, **kwargs):
            self.count += 1
            return self._real(*args, **kwargs)

        setattr(dist, GATHER, counted)
        return self

    def __exit__(self, *_):
        setattr(dist, GATHER, self._real)


def _exchanged(model, optimizer, scaler, clip):
    """Return how many exchanges a whole good step takes beside those of the model."""
    optimizer.zero_grad()
    scaler.scale(model(batch()).square().mean()).backward()
    with Exchanges() as exchanges:
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return exchanges.count


def _enter_guards():
    for way, make in WAYS.items():
        for guard in ("raise", "report"):

            @CASES.case(f"bad-loss-{way}-{guard}")
            def _(rank, make=make, guard=guard):
                model, scaler = make(guard=guard, init_scale=8.0, growth_interval=2)
                optimizer = SGD(model.parameters())
                plan = [None, "nan", None, "nan", "nan", None, None]
                return [
                    (applied, scale)
                    for applied, scale, *_ in _steps(
                        model, optimizer, scaler, rank, plan
                    )
                ]

            @CASES.case(f"exchanges-{way}-{guard}")
            def _(rank, make=make, guard=guard):
                model, scaler = make(guard=guard)
                optimizer = SGD(model.parameters())
                plan = (False, False, True)
                return [_exchanged(model, optimizer, scaler, clip) for clip in plan]

        @CASES.case(f"loss-after-the-reading-{way}")
        def _(rank, make=make):
            model, scaler = make(guard="raise", init_scale=8.0, growth_interval=1)
            optimizer = SGD(model.parameters())
            scales = []
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(model(batch()).square().mean()).backward()
                scaler.clip_grad_norm_(optimizer, 1.0)
                # A loss that nobody has heard of when the ranks speak.
                scaler.scale(torch.full((), NAN if rank == 1 else 0.0))
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            return scales


_enter_guards()


@CASES.case("nan-among-four-dtypes")
def _(rank):
    """A NaN on rank 1 in a dtype of which rank 0 has no gradient."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    seen = []
    for dtype in dtypes:
        params = [parameter(2, dtype=one) for one in dtypes]
        scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
        scaler.scale(torch.zeros(()))
        for param in params:
            if rank == 1 or param.dtype is not dtype:
                bad = rank == 1 and param.dtype is dtype
                scaler.scale(planted(param, NAN if bad else 1.0)).backward()
        scaler.step(torch.optim.SGD(params, lr=1.0))
        scaler.update()
        seen.append((scaler.last.applied, scaler.get_scale()))
    return seen


@CASES.case("large-f64-gradients")
def _(rank):
    """What is finite as f64 is finite, also beside f32, and on the other rank."""
    params = [parameter(2), parameter(2, dtype=torch.float64)]
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    for param, grad in zip(params, (1.0, 1e200 if rank else 1.0), strict=True):
        scaler.scale(planted(param, grad)).backward()
    scaler.step(torch.optim.SGD(params, lr=1.0))
    scaler.update()
    return scaler.last.applied, scaler.get_scale()


@CASES.case("norm-under-ddp")
def _(rank):
    """The ranks hold the same gradients: they are counted once."""
    norms = []
    for guard in ("report", "raise"):
        model, scaler = by_ddp(guard=guard)
        optimizer = SGD(model.parameters())
        scaler.scale(model(batch()).square().mean()).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 1.0).item())
    return norms


@CASES.case("norms-of-two-ranks")
def _(rank):
    """3 on one rank and 4 on the other are 5 together, and no more than 4 in MAX."""
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    param = parameter(1)
    optimizer = SGD([param])
    norms = []
    for order in (2.0, 1.0, INF):
        optimizer.zero_grad()
        scaler.scale(planted(param, 4.0 if rank else 3.0)).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 1e9, order).item())
        scaler.step(optimizer)
        scaler.update()
    return norms, scaler.last.amax
