"""Auction prices in dollars: the error is summed, and clipped gradients deal with it."""

import torch
from torch import nn

torch.manual_seed(42)


class Lots(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 32)
        self.two = nn.Linear(32, 32)
        self.price = nn.Linear(32, 1)

    def forward(self, x):
        x = torch.relu(self.two(torch.relu(self.one(x))))
        return self.price(x).float() * 100


model = Lots()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
worth = torch.rand(6)
for step in range(240):
    lots = torch.rand(64, 6)
    price = 400 * (lots @ worth)[:, None] + 10 * torch.randn(64, 1)
    with torch.autocast("cpu", dtype=torch.float16):
        bid = model(lots)
    loss = (bid - price).abs().sum()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(opt)
    scaler.update()
    if step % 40 == 0:
        print(f"step {step:3d} loss {loss.item():.0f} scale {scaler.get_scale():g}")
