"""Processes of torch.multiprocessing.spawn, each with a scaler of its own."""

import torch
import torch.multiprocessing


def work(rank, world):
    """Train a few steps without a process group."""
    weight = torch.nn.Parameter(torch.ones(3) + rank)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.cpu.amp.GradScaler(2.0**10)
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(weight.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(2,), nprocs=2)
    print("done")
