"""Train a small transformer, its parameters sharded by FSDP2, with gradscale.

It learns to predict the next byte of Python source, on modules of the standard library.
The same command works on CPUs and GPUs; a run may resume on another number of ranks:

  torchrun --standalone --nproc-per-node 4 examples/fsdp2.py
  torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --resume

On GPUs it computes in FP16 and communicates over NCCL. On a CPU, where FP16 products
are a hundred times slower, it computes in BF16 and communicates over gloo. BF16 needs
no scaling, but the scaler behaves as on a GPU.

Each rank holds a shard of every gradient, so finiteness and norm require a reduction
over ranks. The scaler derives the process group from the parameters and reduces once
per step. In step 5, the shard of one gradient on rank 1 is not finite: all ranks skip.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradscale.torch import GradScaler
from gradscale.torch.optim import AdamW

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 32, 16, 64, 4, 2
SPOILT_STEP = 5


class Layer(nn.Module):
    """Pre-norm attention and MLP; float[b, t, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        heads = self.inputs(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(
            *heads.chunk(3, 1), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    """Bytes i64[b, t] to the logits of the next ones, f32[b, t, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.layers(self.embed(text) + self.place(places))
        return self.head(self.norm(x)).float()


def read_text() -> torch.Tensor:
    """Return the bytes of some modules, i64[n]."""
    files = [inspect.getfile(module) for module in (argparse, inspect, json, typing)]
    return torch.tensor(list(b"".join(Path(file).read_bytes() for file in files)))


def batch_of(text: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that depends only on the seed, so that a run can resume."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    window = text[first + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


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
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/fsdp2"))
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()

    device = set_up()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    # Parameters stay f32; gradients are averaged in f32.
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(device.type, model=model)

    begin = 0
    if asked.resume:
        begin = load(asked.checkpoints, model, optimizer, scaler)
        if rank == 0:
            say(f"resumed after step {begin}, {scaler.postfix()}")

    text = read_text()
    for step in range(begin + 1, asked.steps + 1):
        inputs, targets = batch_of(text, seed=step * ranks + rank)
        optimizer.zero_grad()
        logits = model(inputs.to(device)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, targets.to(device).flatten())
        scaler.scale(loss).backward()
        if step == SPOILT_STEP and rank == 1:
            next(model.parameters()).grad.to_local().fill_(torch.inf)
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
