"""DistributedDataParallel; started by torchrun."""

import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = os.environ.get("FOREIGN_DEVICE", "cpu")
torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(rank)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device, init_scale=2.0**40)
batches = torch.randn(40, world, 8, 16)
for step, batch in enumerate(batches[:, rank].to(device)):
    optimizer.zero_grad()
    loss = (model(batch) - 1.0).square().mean()
    # One rank has a batch that overflows: all of them must skip.
    factor = torch.inf if step == 7 and rank == world - 1 else 1.0
    scaler.scale(loss * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    if rank == 0:
        print(loss.item().hex(), scaler.get_scale(), flush=True)
# PyTorch aborts if a gloo thread releases its last work while Python exits
# (pytorch/pytorch#179291): wait until it has.
time.sleep(0.5)
torch.distributed.destroy_process_group()
