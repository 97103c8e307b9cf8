"""Cases of `test_sharded`: the scaler for FSDP1, with real FSDP1 over gloo."""

import pickle
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as TorchShardedGradScaler,
)

from gradscale import ConfigError
from gradscale.torch import GradScaler, ShardedGradScaler, optim
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.models import block
from tests.torch.parallel.norm_cases import batch
from tests.torch.training import INF, NAN, backward, iterate, parameter

CASES = Cases()
CPU = torch.device("cpu")
LIMIT = 0.01
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "own": lambda params: optim.AdamW(params, lr=0.1),
}
KINDS = {"sharded": ShardedGradScaler, "plain": GradScaler}


def fsdp(model, **how):
    """Return the model, cut by FSDP1 over all ranks."""
    return FSDP(model, device_id=CPU, **how)


def weights_of(model):
    """Return all weights in one list, put together again."""
    if not isinstance(model, FSDP):
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    with FSDP.summon_full_params(model):
        # A flat parameter may end with padding.
        whole = [p.detach().flatten() for p in model.module.parameters()]
        return torch.cat(whole).tolist()


def _clipped(model, make, kind, *, unscale=False):
    optimizer, scaler = make(model.parameters()), kind("cpu", init_scale=2.0**10)
    scaler.scale(model(batch()).square().mean()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, LIMIT)
    scaler.step(optimizer)
    scaler.update()
    return {"norm": norm.item(), "weights": weights_of(model)}


def _norm_of_fsdp(model):
    """Return what FSDP1's own clip says; of unscaled gradients."""
    model(batch()).square().mean().backward()
    return model.clip_grad_norm_(LIMIT).item()


def _enter():
    for orig in (False, True):
        words = "orig" if orig else "flat"
        for name, make in OPTIMIZERS.items():
            for which, kind in KINDS.items():
                for unscale in (False, True):
                    title = f"{words}-{name}-{which}-{unscale}"

                    @CASES.case(f"clip-{title}")
                    def _(rank, make=make, kind=kind, orig=orig, unscale=unscale):
                        sure = _clipped(block(), make, GradScaler, unscale=unscale)
                        model = fsdp(block(), use_orig_params=orig)
                        seen = _clipped(model, make, kind, unscale=unscale)
                        own = _norm_of_fsdp(fsdp(block(), use_orig_params=orig))
                        return {"alone": sure, "fsdp": seen, "own": own}

            @CASES.case(f"inf-in-one-shard-{words}-{name}")
            def _(rank, make=make, orig=orig):
                return _inf_in_one_shard(rank, make, orig)


_enter()


def _inf_in_one_shard(rank, make, orig):
    model = fsdp(block(), use_orig_params=orig)
    optimizer, scaler = make(model.parameters()), ShardedGradScaler("cpu", 4.0)
    before = weights_of(model)
    scaler.scale(model(batch()).square().mean()).backward()
    if rank == 1:
        held = [p.grad for p in model.parameters() if p.grad is not None]
        held[-1].view(-1)[-1] = INF
    scaler.step(optimizer)
    scaler.update()
    untouched = weights_of(model) == before
    return untouched, scaler.last.applied, scaler.get_scale()


@CASES.case("empty-shards")
def _(rank):
    model = fsdp(block(), use_orig_params=True)
    model(batch()).square().mean().backward()
    return [param.grad is None for param in model.parameters()]


class Frozen(nn.Module):
    """A layer for FSDP1, and one that it is told to leave alone."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Linear(8, 6)
        self.left = nn.Linear(6, 4)

    def forward(self, x):
        """Return four numbers for each row."""
        return self.left(self.cut(x))


def _frozen():
    torch.manual_seed(0)
    return Frozen()


@CASES.case("ignored-module")
def _(rank):
    def cut():
        model = _frozen()
        return fsdp(model, ignored_modules=[model.left])

    sure = _clipped(_frozen(), OPTIMIZERS["sgd"], GradScaler)
    seen = _clipped(cut(), OPTIMIZERS["sgd"], ShardedGradScaler)
    return {"alone": sure, "fsdp": seen, "own": _norm_of_fsdp(cut())}


@CASES.case("no-shard")
def _(rank):
    def cut():
        return fsdp(block(), sharding_strategy=ShardingStrategy.NO_SHARD)

    sure = _clipped(block(), OPTIMIZERS["sgd"], GradScaler)
    seen = _clipped(cut(), OPTIMIZERS["sgd"], ShardedGradScaler)
    return {"alone": sure, "fsdp": seen, "own": _norm_of_fsdp(cut())}


@CASES.case("half-precision")
def _(rank):
    half = torch.float16
    precision = MixedPrecision(param_dtype=half, reduce_dtype=half)
    model = fsdp(block(), mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler, losses, applied = ShardedGradScaler("cpu"), [], []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        assert loss.dtype is half
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        applied.append(scaler.last.applied)
    return {"losses": losses, "applied": applied, "scale": scaler.get_scale()}


@CASES.case("half-gradients")
def _(rank):
    scaler, param = ShardedGradScaler("cpu", 4.0), parameter(2, dtype=torch.float16)
    optimizer = torch.optim.SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, 0.5)
    return param.tolist()


def _sequence(seed, rank):
    """Return gradients, some not finite, each on some rank or on several."""
    plan = random.Random(seed)
    values = []
    for _ in range(25):
        bad = plan.random() < 0.3
        where = plan.choice([(0,), (1,), (0, 1)])
        word = plan.choice([INF, -INF, NAN])
        good = plan.choice([0.5, -0.25, 3.0, 1e-4])
        values.append(word if bad and rank in where else good + rank)
    return values


def _run(kind, seed, rank, unscale):
    scaler = kind("cpu", 2.0**6, 0.5, 2.0, 3)
    param = parameter(3)
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.5)
    seen = []
    for grad in _sequence(seed, rank):
        optimizer.zero_grad()
        backward(scaler, param, grad)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"], param.tolist()))
    return seen


for _seed in range(6):

    @CASES.case(f"sequence-{_seed}")
    def _(rank, seed=_seed):
        unscale = seed % 2 == 1
        ours = _run(ShardedGradScaler, seed, rank, unscale)
        return {
            "ours": ours,
            "torch": _run(TorchShardedGradScaler, seed, rank, unscale),
        }


def _train(kind, orig):
    model = fsdp(block(), use_orig_params=orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler, scales = kind("cpu", 2.0**8, 0.5, 2.0, 2), []
    for step in range(8):
        optimizer.zero_grad()
        factor = INF if step in (2, 5) else 1.0
        scaler.scale(model(batch()).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weights_of(model)


for _orig in (False, True):

    @CASES.case(f"training-{_orig}")
    def _(rank, orig=_orig):
        kinds = {"ours": ShardedGradScaler, "torch": TorchShardedGradScaler}
        return {name: _train(kind, orig) for name, kind in kinds.items()}


@CASES.case("pickling")
def _(rank):
    scaler, param = ShardedGradScaler("cpu", 8.0), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, INF if rank else 1.0)
    copy = pickle.loads(pickle.dumps(scaler))
    iterate(copy, optimizer, param, 1.0 if rank else INF)
    return copy.get_scale(), copy.skipped_steps, param.tolist()


@CASES.case("pickling-with-a-group")
def _(rank):
    try:
        pickle.dumps(ShardedGradScaler("cpu", process_group=dist.group.WORLD))
    except ConfigError as error:
        return str(error)


@CASES.case("states")
def _(rank):
    seen = []
    for first, second in (
        (ShardedGradScaler, TorchShardedGradScaler),
        (TorchShardedGradScaler, ShardedGradScaler),
    ):
        scaler, param = first("cpu", 8.0, 0.25, 4.0, 5), parameter(2)
        optimizer = torch.optim.SGD([param], lr=1.0)
        for grad in (INF if rank else 1.0, 1.0, 1.0):
            iterate(scaler, optimizer, param, grad)
        after = second("cpu")
        after.load_state_dict(scaler.state_dict())
        # The older one writes its five keys; ours has one more.
        five = TorchShardedGradScaler("cpu").state_dict()
        state = after.state_dict()
        seen.append({key: state[key] for key in five})
    return seen


@CASES.case("smaller-group")
def _(rank):
    groups = [dist.new_group([one]) for one in range(2)]
    scaler = ShardedGradScaler("cpu", 8.0, process_group=groups[rank])
    param = parameter(2)
    iterate(scaler, torch.optim.SGD([param], lr=1.0), param, INF if rank else 1.0)
    return scaler.get_scale(), scaler.process_group is groups[rank]
