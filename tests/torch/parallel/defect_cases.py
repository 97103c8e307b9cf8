"""Cases of `test_defects_of_ranks`: what torch's scalers get wrong on several ranks.

A scenario takes the scaler's class and the rank, and fails on every rank where the
class fails on any. Each is run twice, on torch's class and on ours. Numbers are those
of the table of defects in PyTorch 2.13.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as TorchShardedGradScaler,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gradscale.torch import GradScaler, ShardedGradScaler
from tests.torch.parallel.launch import Cases
from tests.torch.training import INF, backward, parameter

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
FUSED = {
    "sgd": {"make": partial(SGD, fused=True)},
    "adam": {"make": partial(torch.optim.Adam, fused=True)},
    "adamw": {"make": partial(AdamW, fused=True)},
}
EVERY = {
    "loop": {"make": partial(SGD, foreach=False)},
    "fused": {"make": partial(AdamW, fused=True)},
}
# By the name of a case: torch's class and ours.
CLASSES = {
    "plain": (torch.amp.GradScaler, GradScaler),
    "sharded": (TorchShardedGradScaler, ShardedGradScaler),
}


class Defect(NamedTuple):
    """A scenario, and how torch's class fails it."""

    scenario: Any
    which: str
    words: str


PASSED = "passed"
DEFECTS: dict[str, Defect] = {}
CASES = Cases()


def torch_fails(name, which, words, **variants):
    """Enter a scenario, once for each variant, and the way in which torch fails it."""

    def enter(scenario):
        for variant, settings in (variants or {"": {}}).items():
            label = f"{name}-{variant}" if variant else name
            case = partial(scenario, **settings)
            DEFECTS[label] = Defect(case, which, words)
            for whose, kind in zip(("torch", "ours"), CLASSES[which], strict=True):
                CASES[f"{label}-{whose}"] = partial(failure_of, case, kind)
        return scenario

    return enter


def failure_of(scenario, kind, rank):
    """Return how the class fails the scenario, or that it passes."""
    try:
        scenario(kind, rank)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return PASSED


def of_all(fact):
    """Return the fact as each of the ranks has it."""
    facts = [fact] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def _placed(values, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torch.nn.Parameter(distribute_tensor(values, mesh, [placement]))


def _give(param, local):
    """Give a DTensor the gradient of which this rank holds `local`."""
    param.grad = DTensor.from_local(local, param.device_mesh, param.placements)


@torch_fails("D5", "sharded", "some ranks stepped and some skipped", **FUSED)
def under_fsdp1_a_fused_step_is_skipped_on_all_ranks_or_on_none(kind, rank, make):
    scaler, param = kind("cpu", init_scale=4.0), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, INF if rank == 1 else 1.0)
    scaler.step(optimizer)
    scaler.update()
    seen = of_all((param.tolist(), scaler.get_scale()))
    assert seen == [([0.0, 0.0], 2.0)] * 2, "some ranks stepped and some skipped"


# Fused SGD counts no steps, and so does not stumble over the shape of the flag.
COUNTING = {name: FUSED[name] for name in ("adam", "adamw")}


@torch_fails("D6", "sharded", r"doesn't match the broadcast shape \[1\]", **COUNTING)
def under_fsdp1_a_fused_optimizer_steps_after_unscale(kind, rank, make):
    scaler, param = kind("cpu", init_scale=4.0), parameter(2, value=8.0)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    # AdamW also decays the weights.
    assert [w <= 7.0 for one in of_all(param.tolist()) for w in one] == [True] * 4


@torch_fails("D7", "sharded", "65536 is not a float16")
def under_fsdp1_a_half_loss_does_not_overflow(kind, rank):
    loss = torch.ones((), dtype=torch.float16)
    assert kind("cpu").scale(loss).item() == 65536.0, "65536 is not a float16"


@torch_fails("D8", "plain", "some ranks stepped and some skipped", **EVERY)
def a_sharded_gradient_after_a_replicated_one_is_seen_by_all_ranks(kind, rank, make):
    params = [_placed(torch.zeros(4), place) for place in (Replicate(), Shard(0))]
    optimizer, scaler = make(params, lr=1.0), kind("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    _give(params[0], torch.full((4,), 4.0))
    _give(params[1], torch.full((2,), INF if rank == 1 else 4.0))
    scaler.step(optimizer)
    scaler.update()
    weights = [param.to_local().tolist() for param in params]
    seen = of_all((weights, scaler.get_scale()))
    untouched = [[0.0] * 4, [0.0] * 2], 2.0
    assert seen == [untouched] * 2, "some ranks stepped and some skipped"


@torch_fails("D9", "plain", "got mixed torch.Tensor and DTensor", **EVERY)
def ordinary_gradients_may_lie_beside_sharded_ones(kind, rank, make):
    spread, ordinary = _placed(torch.zeros(4), Shard(0)), parameter(2)
    groups = [{"params": [spread]}, {"params": [ordinary]}]
    optimizer, scaler = make(groups, lr=1.0), kind("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    _give(spread, torch.full((2,), 4.0))
    ordinary.grad = torch.full((2,), 4.0)
    scaler.step(optimizer)
    scaler.update()
    weights = spread.to_local().tolist() + ordinary.tolist()
    assert [w < 0.0 for one in of_all(weights) for w in one] == [True] * 8
