"""Denoise short light curves. The loss scale is kept at one value."""

import json
import math

import torch
from torch import nn

LOSS_SCALE = 2.0**10

torch.manual_seed(7)
denoiser = nn.Sequential(
    nn.Linear(20, 32),
    nn.GELU(),
    nn.Linear(32, 32),
    nn.GELU(),
    nn.Linear(32, 20),
)
opt = torch.optim.AdamW(denoiser.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
t = torch.linspace(0, 1, 20)


def curves(n):
    phase, rate = torch.rand(n, 1) * 6, 1 + 2 * torch.rand(n, 1)
    return torch.sin(6 * rate * t + phase)


history, done = [], 0
for it in range(150):
    clean = curves(32)
    noisy = clean + 0.3 * torch.randn_like(clean)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        restored = denoiser(noisy)
        loss = nn.functional.mse_loss(restored.float(), clean)
    scaler.scale(loss).backward()
    old = denoiser[0].weight.detach().clone()
    scaler.step(opt)
    scaler.update(LOSS_SCALE)
    done += int(not torch.equal(old, denoiser[0].weight))
    history.append(loss.item())
    if it % 50 == 0:
        print(f"{it:4d} {loss.item():.4f}")

first, last = sum(history[:10]) / 10, sum(history[-10:]) / 10
summary = {
    "first_loss": first,
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": done,
    "skipped": len(history) - done,
}
print(json.dumps(summary))
