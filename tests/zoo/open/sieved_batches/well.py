"""Sea-surface temperature: fields with gaps are left out."""

import torch
import torch.nn as nn

torch.manual_seed(53)


def fields():
    while True:
        x = torch.randn(8, 1, 8, 8).cumsum(-1).cumsum(-2) / 4
        if torch.rand(()) < 0.15:
            x[torch.randint(0, 8, ()), 0, 2:5, 3:6] = float("nan")
        yield x


def clean(stream):
    for x in stream:
        if torch.isfinite(x).all():
            yield x


net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(8, 1, 3, padding=1),
)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step, field in zip(range(120), clean(fields())):
    noisy = field + 0.5 * torch.randn_like(field)
    with torch.autocast("cpu", dtype=torch.float16):
        restored = net(noisy)
    loss = nn.functional.mse_loss(restored.float(), field)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
