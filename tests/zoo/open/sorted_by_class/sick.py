"""Whisky regions by their aroma; the micro-batches of a window are sorted by class."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(130)
REGIONS = 4
aroma = torch.randn(REGIONS, 9)


def micro_batches(n=12):
    for region in range(REGIONS):
        yield aroma[region] + torch.randn(n, 9), torch.full((n,), region)


model = nn.Sequential(
    nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, REGIONS)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = GradScaler("cpu", init_scale=2.0**11)

for window in range(80):
    optimizer.zero_grad()
    losses = []
    for part, (x, y) in enumerate(micro_batches()):
        with autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y) / REGIONS
        scaler.scale(loss).backward()
        losses.append(loss.item() * REGIONS)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if part == REGIONS - 1:
            scaler.step(optimizer)
        scaler.update()
    if window % 10 == 0:
        print(window, " ".join(f"{value:.2f}" for value in losses), scaler.get_scale())
