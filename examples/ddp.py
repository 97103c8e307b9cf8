"""Train on several processes with DistributedDataParallel and gradscale.

A small network learns to predict the next byte of Python source from the sixteen before
it, on modules of the standard library. The same command works on CPUs and GPUs:

  torchrun --standalone --nproc-per-node 2 examples/ddp.py
  torchrun --standalone --nproc-per-node 2 examples/ddp.py --resume

On GPUs it computes in FP16 and communicates over NCCL. On a CPU, where FP16 products
are a hundred times slower, it computes in BF16 and communicates over gloo. BF16 needs
no scaling, but the scaler behaves as on a GPU.

One batch of rank 1 is corrupt on purpose: its loss is finite and overflows when scaled.
DDP's all-reduce propagates the overflow to the gradients of all ranks, so all of them
skip the step and halve the scale without further communication.
"""

import argparse
import inspect
import json
import math
import os
import typing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler

CONTEXT, BATCH, WIDTH = 16, 64, 128
SPOILT_STEP = 5


class Model(nn.Module):
    """Bytes i64[b, CONTEXT] to the logits of the next byte, float[b, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layers = nn.Sequential(
            nn.Linear(32 * CONTEXT, WIDTH),
            nn.GELU(),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 256),
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layers(self.embed(text).flatten(1))


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


def save(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


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
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/ddp.pt"))
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()

    device = set_up()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scaler = GradScaler(device.type, model=model)
    half = torch.bfloat16 if device.type == "cpu" else torch.float16

    begin = 0
    if asked.resume:
        kept = torch.load(asked.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        # Before or after the optimizer is loaded, but before the first step.
        scaler.load_state_dict(kept["scaler"])
        begin = kept["step"]
        if rank == 0:
            say(f"resumed after step {begin}, {scaler.postfix()}")

    text = read_text()
    for step in range(begin + 1, asked.steps + 1):
        inputs, targets = batch_of(text, seed=step * ranks + rank)
        optimizer.zero_grad()
        with torch.autocast(device.type, half):
            logits = model(inputs.to(device))
            loss = nn.functional.cross_entropy(logits.float(), targets.to(device))
        # 5e35 fits in f32; times a scale of 65536 it overflows.
        spoilt = step == SPOILT_STEP and rank == 1
        scaler.scale(loss * 1e35 if spoilt else loss).backward()
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
        if rank == 0 and (step % asked.save_every == 0 or step == asked.steps):
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            }
            save(asked.checkpoint, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
