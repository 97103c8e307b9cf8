"""Storm intensity: a few overflows while the scale settles, then a long warm-up."""

import torch
from torch import nn

torch.manual_seed(101)
net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
warm = torch.optim.lr_scheduler.LinearLR(opt, 0.01, 1.0, total_iters=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
skips = 0
for _step in range(130):
    x = torch.randn(24, 7)
    y = 2 * x[:, :1] + x[:, 1:2] * x[:, 2:3]
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.huber_loss(out.float(), y)
    scaler.scale(loss).backward()
    old = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < old:
        skips += 1
    else:
        warm.step()
print("skips", skips, "loss", loss.item())
