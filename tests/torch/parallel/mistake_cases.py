"""Cases of `test_mistakes`: rank 1 is set up otherwise, or calls otherwise.

Each case runs until a rank raises, and tells in which call that was.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradscale import DynamicScale, GradscaleError, StaticScale
from gradscale.judge.catalogue import BY_CODE
from gradscale.torch import GradScaler
from tests.torch.parallel.fault_cases import WAYS
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.norm_cases import batch
from tests.torch.training import parameter

CASES = Cases()
# A scaler that does not know of DDP speaks to nobody.
SPEAKING = {name: make for name, make in WAYS.items() if name != "bare-ddp"}


class Calls:
    """Runs calls one after another; notes which of them raised, and what."""

    def __init__(self):
        self.count, self.said = 0, None
        self._began = time.monotonic()

    def run(self, name, call, *args):
        """Make a call unless one has raised before."""
        if self.said is None:
            self.count += 1
            try:
                call(*args)
            except GradscaleError as error:
                self.said = {
                    "call": name,
                    "count": self.count,
                    "code": error.code,
                    "text": str(error),
                    "seconds": time.monotonic() - self._began,
                }


def backward(scaler, optimizer, model):
    """Make the gradients of one step."""
    optimizer.zero_grad()
    scaler.scale(model(batch()).square().mean()).backward()


def run(model, scaler, steps=2, each=None):
    """Train for some steps; return what was said, None if nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = Calls()
    for step in range(steps):
        if calls.said is None:
            backward(scaler, optimizer, model)
        if each is not None:
            each(calls, scaler, optimizer, step)
        calls.run("step", scaler.step, optimizer)
        calls.run("update", scaler.update)
    return calls.said


# What rank 1 is given instead, for each way in which ranks speak.
SETTINGS = {
    "init-scale": {"init_scale": 4.0},
    "growth-interval": {"growth_interval": 7},
    "policy": {"policy": StaticScale(scale=2.0**16)},
    "bounds": {"policy": DynamicScale(max_scale=2.0**20)},
    "guard": {"guard": "raise"},
}


def _state(updates, scale):
    """Return a checkpoint of a scaler that has done so many updates."""
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    for _ in range(updates):
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.state_dict() | {"scale": scale}


def _of_torch(state):
    """Return what torch's scaler would have written: no counts."""
    five = torch.amp.GradScaler("cpu").state_dict()
    return {key: state[key] for key in five}


def _enter():
    for way, make in SPEAKING.items():
        for word, other in SETTINGS.items():

            @CASES.case(f"{word}-{way}")
            def _(rank, make=make, other=other):
                return run(*make(**(other if rank == 1 else {})))

        @CASES.case(f"later-checkpoint-{way}")
        def _(rank, make=make):
            model, scaler = make()
            scaler.load_state_dict(_state(3 if rank == 1 else 2, 2.0**16))
            return run(model, scaler)

        @CASES.case(f"loaded-on-one-rank-{way}")
        def _(rank, make=make):
            model, scaler = make()
            if rank == 1:
                scaler.load_state_dict(_of_torch(_state(2, 2.0**12)))
            return run(model, scaler)

        @CASES.case(f"other-scale-{way}")
        def _(rank, make=make):
            model, scaler = make()
            scaler.load_state_dict(_state(2, 2.0**12 if rank == 1 else 2.0**16))
            return run(model, scaler)

        @CASES.case(f"all-is-well-{way}")
        def _(rank, make=make):
            model, scaler = make()
            scaler.load_state_dict(_state(2, 2.0**12))
            return run(model, scaler, 3, _clip_by(1.0)), scaler.get_scale()


def _clip_by(max_norm, only=None, unscale=False, bare=False, from_step=0):
    """Return calls before `step` that clip, on all ranks or on one."""

    def each(calls, scaler, optimizer, step):
        if unscale:
            calls.run("unscale_", scaler.unscale_, optimizer)
        if only in (None, dist.get_rank()) and step >= from_step:
            target = optimizer.param_groups[0]["params"] if bare else optimizer
            calls.run("clip", scaler.clip_grad_norm_, target, max_norm)

    return each


_enter()
# What only rank 1 does, or does otherwise, where ranks speak in every step.
CLIPS = {
    "clip-on-one-rank": lambda rank: _clip_by(1.0, only=1),
    "late-clip-on-one-rank": lambda rank: _clip_by(1.0, only=1, unscale=True),
    "bare-clip-on-one-rank": lambda rank: _clip_by(1.0, only=1, bare=True),
    "second-clip-on-one-rank": lambda rank: _clip_by(1.0, only=1, from_step=1),
    "other-limit": lambda rank: _clip_by(2.0 if rank == 1 else 1.0),
}


def _enter_clips():
    for way in ("fsdp2", "group"):
        for word, each in CLIPS.items():

            @CASES.case(f"{word}-{way}")
            def _(rank, make=WAYS[way], each=each):
                return run(*make(), each=each(rank))


_enter_clips()


def _two_models(way):
    """Return two models of different shapes, spread in one way."""
    torch.manual_seed(0)
    models = [nn.Linear(8, 4), nn.Linear(8, 6)]
    if way == "ddp":
        return [DistributedDataParallel(model) for model in models]
    return [fully_shard(model) for model in models]


def _in_turn(way, rank, steps, swapped):
    """Step two optimizers; rank 1 in the other order where `swapped` says so."""
    models = _two_models(way)
    how = {"model": models[0], "guard": "raise"} if way == "ddp" else {}
    scaler, calls = GradScaler("cpu", **how), Calls()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(steps):
        if calls.said is None:
            for optimizer, model in zip(optimizers, models, strict=True):
                backward(scaler, optimizer, model)
        other = rank == 1 and step in swapped
        for optimizer in reversed(optimizers) if other else optimizers:
            calls.run("step", scaler.step, optimizer)
        calls.run("update", scaler.update)
    return calls.said


for _way in ("fsdp2", "ddp"):

    @CASES.case(f"other-order-{_way}")
    def _(rank, way=_way):
        return _in_turn(way, rank, 2, swapped={0, 1})

    @CASES.case(f"other-order-later-{_way}")
    def _(rank, way=_way):
        return _in_turn(way, rank, 3, swapped={1})

    @CASES.case(f"same-order-{_way}")
    def _(rank, way=_way):
        return _in_turn(way, rank, 3, swapped=set())


def _touch(calls, scaler, optimizer, step):
    """Clip; on rank 1 also write to a gradient, so that it is read once more."""
    calls.run("clip", scaler.clip_grad_norm_, optimizer, 1.0)
    if dist.get_rank() == 1 and calls.said is None:
        optimizer.param_groups[0]["params"][0].grad.mul_(0.5)


@CASES.case("further-reading")
def _(rank):
    # With a model that itself waits for others, gloo would stop both at once.
    return run(*WAYS["group"](), each=_touch)


def _half(rank, clip):
    """Rank 1 has float16 gradients, which plain optimizers refuse."""
    scaler, calls = GradScaler("cpu", process_group=dist.group.WORLD), Calls()
    param = parameter(2, dtype=torch.float16 if rank == 1 else torch.float32)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.zeros(()))
    param.grad = torch.ones_like(param)
    if clip:
        calls.run("clip", scaler.clip_grad_norm_, optimizer, 1.0)
    calls.run("step", scaler.step, optimizer)
    return calls.said


for _clip in (False, True):

    @CASES.case(f"half-gradients-on-one-rank-{_clip}")
    def _(rank, clip=_clip):
        return _half(rank, clip)


@CASES.case("overlapping-gradients-on-one-rank")
def _(rank):
    """A clip of bare parameters refuses what it cannot multiply."""
    scaler, calls = GradScaler("cpu", process_group=dist.group.WORLD), Calls()
    params, buffer = [parameter(2), parameter(2)], torch.ones(4)
    scaler.scale(torch.zeros(()))
    params[0].grad = buffer[:2]
    params[1].grad = buffer[1:3] if rank == 1 else buffer[2:]
    calls.run("clip", scaler.clip_grad_norm_, params, 1.0)
    return calls.said


def _example(kind, rank):
    """Run the catalogue's example on a model that is cut by FSDP2."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 1))
    names = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6),
        "batch": torch.full((8, 4), 0.1),
        "loss_of": lambda batch: model(batch).square().mean(),
        "GradScaler": GradScaler,
    }
    snippet = getattr(BY_CODE["GS111"], kind).replace('"cuda"', '"cpu"')
    calls = Calls()
    calls.run("example", exec, snippet, names)
    return calls.said


for _kind in ("example", "instead"):

    @CASES.case(_kind)
    def _(rank, kind=_kind):
        return _example(kind, rank)
