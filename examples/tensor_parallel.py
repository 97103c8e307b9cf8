"""Train a network with tensor parallelism and gradscale.

It learns to predict the next byte of Python source from the sixteen before it, on
modules of the standard library. The same command works on CPUs and GPUs:

  torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py
  torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --resume

On GPUs it computes in FP16 and communicates over NCCL. On a CPU, where FP16 products
are a hundred times slower, it computes in BF16 and communicates over gloo. BF16 needs
no scaling, but the scaler behaves as on a GPU.

All ranks get the same batch. Wide layers are sharded, all others replicated; one
optimizer has both kinds of parameters. The norm counts every element once, and the
ranks agree on each step in one reduction. In step 5, a gradient shard on rank 1 is not
finite: all ranks skip.
"""

import argparse
import inspect
import json
import math
import os
import shutil
import typing
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gradscale.torch import GradScaler
from gradscale.torch.optim import AdamW

CONTEXT, BATCH, WIDTH, LAYERS = 16, 64, 64, 2
SPOILT_STEP = 5


class Layer(nn.Module):
    """A pre-norm MLP with one wide layer; float[b, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Bytes i64[b, CONTEXT] to the logits of the next byte, float[b, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.join = nn.Embedding(256, 32), nn.Linear(32 * CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.norm(self.layers(self.join(self.embed(text).flatten(1)))))


def read_text() -> torch.Tensor:
    """Return the bytes of some modules, i64[n]."""
    files = [inspect.getfile(module) for module in (argparse, inspect, json, typing)]
    return torch.tensor(list(b"".join(Path(file).read_bytes() for file in files)))


def batch_of(text: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that depends only on the seed, so that a run can resume."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    window = text[first + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


def kept_of(
    model: nn.Module, optimizer: AdamW, scaler: GradScaler
) -> dict[str, object]:
    """Return the contents of a checkpoint; the scaler itself is a stateful entry."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "scaler": scaler}


def save(folder: Path, step: int, kept: dict[str, object]) -> None:
    """Write a checkpoint atomically; all ranks call it."""
    unfinished, finished = folder / "unfinished", folder / f"step-{step:06}"
    if dist.get_rank() == 0:
        # Left by a run that was killed during a save.
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    # Returns once every rank has written its part.
    dcp.save({**kept, "step": step}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        shutil.rmtree(finished, ignore_errors=True)
        os.replace(unfinished, finished)
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: AdamW, scaler: GradScaler) -> int:
    """Load the last checkpoint, written by any number of ranks; return its step."""
    found = sorted(folder.glob("step-*"))
    if not found:
        raise SystemExit(f"There is no checkpoint in {folder}. Run without --resume.")
    kept = {**kept_of(model, optimizer, scaler), "step": 0}
    dcp.load(kept, checkpoint_id=found[-1])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=kept["model"],
        optim_state_dict=kept["optimizer"],
    )
    return kept["step"]


def say(line: str) -> None:
    """Print a line in one write, so that ranks do not interleave."""
    print(f"{line}\n", end="", flush=True)


def set_up() -> torch.device:
    """Join the other processes; return the device of this one."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("Start it with torchrun; the first lines of the file say how.")
    local, ranks_here = (int(os.environ[f"LOCAL_{n}"]) for n in ("RANK", "WORLD_SIZE"))
    if torch.cuda.device_count() < ranks_here:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints/tensor_parallel")
    )
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()

    device = set_up()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(device.type, model=model)

    begin = 0
    if asked.resume:
        begin = load(asked.checkpoints, model, optimizer, scaler)
        if rank == 0:
            say(f"resumed after step {begin}, {scaler.postfix()}")

    text = read_text()
    for step in range(begin + 1, asked.steps + 1):
        inputs, targets = batch_of(text, seed=step)
        optimizer.zero_grad()
        with torch.autocast(device.type, half):
            logits = model(inputs.to(device))
            loss = nn.functional.cross_entropy(logits.float(), targets.to(device))
        scaler.scale(loss).backward()
        if step == SPOILT_STEP and rank == 1:
            model.layers[0].up.weight.grad.to_local().fill_(torch.inf)
        norm = scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()

        # Waits for the device; a long run reads it less often.
        if not scaler.last.applied:
            now = f"2^{math.log2(scaler.get_scale()):g}"
            say(f"rank {rank}: step {step} skipped, the scale is now {now}")
        if rank == 0 and (step % 10 == 0 or step == asked.steps):
            told = f"loss {loss.item():.2f}, norm {norm.item():.2f}"
            say(f"step {step}: {told}, {scaler.postfix()}")
        if step % asked.save_every == 0 or step == asked.steps:
            save(asked.checkpoints, step, kept_of(model, optimizer, scaler))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
