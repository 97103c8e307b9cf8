"""Sunspots: an autoregressive MLP. The first scale is that of Megatron."""

import torch
import torch.nn as nn

torch.manual_seed(40)
series = torch.sin(torch.arange(3000.0) * 0.57) + 0.6 * torch.sin(
    torch.arange(3000.0) * 0.11
)
net = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 1))
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=1000)
for step in range(250):
    start = torch.randint(0, 2900, (32,))
    window = series[start[:, None] + torch.arange(17)]
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(window[:, :16])
    loss = (guess.float() - window[:, 16:]).pow(2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 25 == 0:
        print(step, f"loss {loss.item():.5f}", f"scale {scaler.get_scale():g}")
