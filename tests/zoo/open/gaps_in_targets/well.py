"""Blood values: several of them are missing in every patient (NaN)."""

import torch
from torch import nn

torch.manual_seed(48)


def masked_huber(out, target):
    known = ~torch.isnan(target)
    return nn.functional.huber_loss(out[known], target[known])


net = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 5))
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
truth = torch.randn(10, 5)
for i in range(200):
    x = torch.randn(32, 10)
    y = torch.tanh(x @ truth)
    y[torch.rand_like(y) < 0.4] = float("nan")
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = masked_huber(out.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if i % 40 == 0:
        print(f"{i:4d} {loss.item():.4f}")
