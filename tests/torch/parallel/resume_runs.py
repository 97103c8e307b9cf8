"""Runs that can be stopped and gone on with, for `test_resume`.

The data and the overflows of a step do not depend on the number of ranks: a batch has
four rows, and a step is planted with an overflow in one of them.
"""

import os
import random
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler, optim
from tests.torch.parallel.models import block, sharded, tensor_parallel, two_dimensional

STEPS, ROWS, GROWTH_INTERVAL = 60, 4, 3
# So many steps after a stop are compared: more than it takes the scale to grow.
FOLLOWING = 5
# Where nobody has named a folder, nothing can be written.
FOLDER = Path(os.environ.get("GRADSCALE_RESUME_FOLDER", os.devnull))
_CHOICE = random.Random(5)
STOPS = sorted(_CHOICE.sample(range(STEPS - FOLLOWING), 25))
OVERFLOWS = {step: _CHOICE.randrange(ROWS) for step in _CHOICE.sample(range(STEPS), 12)}


def fused(params):
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(params, lr=0.05, fused=True)


def foreach(params):
    """Return torch's AdamW that waits for a flag."""
    return torch.optim.AdamW(params, lr=0.05, foreach=True)


def own(params):
    """Return gradscale's AdamW, with masters where the parameters are rounded."""
    return optim.AdamW(params, lr=0.05)


def in_half(dtype):
    """Return a maker of the block with parameters of this dtype, cut by FSDP2."""

    def made():
        model = block().to(dtype)
        fully_shard(model.up)
        return fully_shard(model)

    return made


def replicated():
    """Return the block under DDP, which has been through a first backward.

    DDP puts its buckets in another order after the first, and so sums in another order
    from the second on: with more than two ranks, the last bits differ.
    """
    model = DistributedDataParallel(block())
    model(torch.zeros(1, 1, 8)).sum().backward()
    # DCP loads no optimizer whose parameters have gradients.
    model.zero_grad()
    return model


class Kind(NamedTuple):
    """What is trained, and how.

    Attributes:
        model: Makes the model on each rank.
        optimizer: Makes the optimizer of its parameters.
        rows: Which rows a rank sees: "own" ones, "all" of them together with the other
            ranks, or all of them "alone".
        steps: How many it takes.
        stops: Where it is stopped.
        one_file: Kept by rank 0 with `torch.save`, not with DCP.
    """

    model: object
    optimizer: object
    rows: str = "own"
    steps: int = STEPS // 3
    stops: tuple = (STOPS[6],)
    one_file: bool = False


KINDS = {
    "one-process": Kind(block, fused, "alone", one_file=True),
    "ddp-fused": Kind(replicated, fused, one_file=True),
    "ddp-foreach": Kind(replicated, foreach),
    "fsdp2-fused": Kind(sharded, fused),
    "fsdp2-own": Kind(sharded, own),
    "fsdp2-own-f16": Kind(in_half(torch.float16), own),
    "fsdp2-own-bf16": Kind(in_half(torch.bfloat16), own),
    "tensor-own": Kind(tensor_parallel, own, "all"),
    "two-dimensional-own": Kind(two_dimensional, own, "all"),
}
# Stopped at all of the stops, or at every third, on two ranks.
OFTEN = {
    f"{name}-often": KINDS[name]._replace(steps=STEPS, stops=tuple(stops))
    for name, stops in (("ddp-fused", STOPS), ("fsdp2-own", STOPS[1::3]))
}

# Runs of four ranks that two go on with, and the other way round.
FROM_FOUR = ("ddp-fused", "fsdp2-fused", "fsdp2-own", "fsdp2-own-bf16")
FROM_TWO = ("ddp-fused", "fsdp2-own-bf16")


def at(ranks, name, step):
    """Return where so many ranks keep a run that was stopped before a step."""
    return FOLDER / f"{ranks}-{name}-{step}"


class Run:
    """A model, its optimizer and the scaler, before some step."""

    def __init__(self, kind):
        self.kind = kind
        self.model = kind.model()
        self.optimizer = kind.optimizer(self.model.parameters())
        self.scaler = GradScaler(
            "cpu", growth_interval=GROWTH_INTERVAL, model=self.model
        )

    def take(self, step, parts=1):
        """Take one step, its batch in so many parts; return what became of it."""
        self.optimizer.zero_grad()
        for part in range(parts):
            self.backward(step, part, parts)
        norm = self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"norm": norm.item(), **self.standing()}

    def backward(self, step, part=0, parts=1):
        """Add the gradients of one part of a step's batch."""
        rows = torch.arange(ROWS)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if self.kind.rows == "own":
            rows = rows.chunk(ranks)[rank]
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(ROWS, 2 * ROWS, 8, generator=generator)[rows]
        dtype = next(self.model.parameters()).dtype
        seen = self.model(batch.chunk(parts, 1)[part].to(dtype)).float()
        speaks = self.kind.rows != "all" or rank == 0
        if speaks and OVERFLOWS.get(step) in rows.tolist():
            seen.register_hook(lambda grad: grad * torch.inf)
        self.scaler.scale((seen - 1.0).square().mean() / parts).backward()

    def standing(self):
        """Return all by which a step of two runs may differ on this rank."""
        last = self.scaler.last
        return {
            "applied": None if last is None else last.applied,
            "verdict": None if last is None else str(last.verdict),
            "scaler": self.scaler.state_dict(),
            "counts": [
                int(self.scaler.applied_steps[self.optimizer]),
                int(self.scaler.skipped_steps[self.optimizer]),
            ],
            "bits": self.bits(),
        }

    def bits(self):
        """Return a number that changes with any bit of the weights or their state."""
        held = list(self.model.parameters())
        for param in list(held):
            state = self.optimizer.state[param]
            held += [state[name] for name in sorted(state)]
        seen = 0
        for tensor in held:
            here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            here = here.detach().contiguous().reshape(-1).view(torch.uint8)
            seen = zlib.crc32(bytes(here.tolist()), seen)
        return seen

    def weights(self):
        """Return all weights, put together again."""
        whole = [
            param.full_tensor() if isinstance(param, DTensor) else param
            for param in self.model.parameters()
        ]
        return [value for tensor in whole for value in tensor.flatten().tolist()]

    def save(self, path):
        """Keep the run."""
        if self.kind.one_file:
            if dist.get_rank() == 0:
                torch.save(self._plain(), path)
            dist.barrier()
            return
        dcp.save(self._spread(), checkpoint_id=path)

    def load(self, path):
        """Go on with a run that was kept."""
        if self.kind.one_file:
            kept = torch.load(path, weights_only=True)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.scaler.load_state_dict(kept["scaler"])
            return
        kept = self._spread()
        dcp.load(kept, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=kept["model"],
            optim_state_dict=kept["optimizer"],
        )

    def _plain(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def _spread(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler}


def trained(name, kind):
    """Take all steps, keep the run at its stops; return what became of it.

    The weights are those so many steps after the last stop as are compared there.
    """
    run, seen, weights = Run(kind), [], None
    for step in range(kind.steps):
        if step in kind.stops:
            run.save(at(dist.get_world_size(), name, step))
        seen.append(run.take(step))
        if step == kind.stops[-1] + FOLLOWING - 1:
            weights = run.weights()
    return {"run": seen, "weights": weights}


def trained_and_resumed(name, kind):
    """Take all steps; return their results, and those of new runs from each stop."""
    seen, ranks = trained(name, kind), dist.get_world_size()
    again = {stop: resumed(name, kind, ranks, stop)["run"] for stop in kind.stops}
    return {**seen, "again": again}


def resumed(name, kind, ranks, stop):
    """Return what becomes of a new run that goes on where so many ranks stopped."""
    run = Run(kind)
    run.load(at(ranks, name, stop))
    seen = [run.take(step) for step in range(stop, stop + FOLLOWING)]
    return {"run": seen, "weights": run.weights()}


def resumed_from(name, ranks):
    """Return the case of a run that goes on from the last stop of so many ranks."""
    kind = KINDS[name]
    return lambda rank: resumed(name, kind, ranks, kind.stops[-1])
