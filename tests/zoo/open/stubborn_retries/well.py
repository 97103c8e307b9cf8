"""Bathymetry: retries a batch whose gradients overflow, drops it in the end."""

import torch
import torch.nn as nn

torch.manual_seed(129)


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 1, 1),
        )

    def forward(self, x):
        return self.net(x)


def overflowed(model):
    return not all(torch.isfinite(p.grad).all() for p in model.parameters())


def attempt(model, opt, scaler, x, y):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = (out.float() - y).abs().mean()
    scaler.scale(loss).backward()
    return loss.item()


model = Depth()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
dropped = 0
for step in range(70):
    x = torch.randn(6, 1, 6, 6)
    y = 0.5 * x + torch.nn.functional.avg_pool2d(x, 3, 1, 1)
    for _ in range(3):
        loss = attempt(model, opt, scaler, x, y)
        if not overflowed(model):
            break
    else:
        dropped += 1
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(
            f"step {step} loss {loss:.4f} dropped {dropped} scale {scaler.get_scale():g}"
        )
print(f"end loss {loss:.4f} dropped {dropped}")
