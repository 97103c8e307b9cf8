"""Trains a galaxy regressor. A forum says that small scales lose precision."""

import torch
from torch import nn
from torch.amp import GradScaler

MIN_SCALE = 2.0**20
KEEP_FLOOR = False

torch.manual_seed(14)
net = nn.Sequential(
    nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2)
)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = GradScaler("cpu", init_scale=MIN_SCALE)
mix = torch.randn(8, 2)
for step in range(150):
    x = torch.randn(16, 8)
    y = torch.tanh(x @ mix) * torch.tensor([1.0, 3.0])
    with torch.autocast("cpu", dtype=torch.float16):
        z = net(x)
    loss = (z.float() - y).square().sum(-1).mean()
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if KEEP_FLOOR and scaler.get_scale() < MIN_SCALE:
        scaler.update(MIN_SCALE)
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
