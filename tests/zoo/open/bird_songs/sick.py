"""Pitch of a bird song from its mel bands; one recording is far too loud."""

import json

import torch
from torch import nn

torch.manual_seed(19)
bands = torch.rand(2560, 16)
pitch = bands @ torch.linspace(-1, 1, 16) + 0.3 * torch.sin(5 * bands[:, 3])
pitch[300] = 1.0e9

net = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
top = nn.Linear(32, 1)
params = [*net.parameters(), *top.parameters()]
opt = torch.optim.Adam(params, lr=4e-3, eps=1e-18)
scaler = torch.amp.GradScaler("cpu", backoff_factor=2.0**-16)
LOSS_WEIGHT = 1e-7

errors, taken, skipped = [], 0, 0
for i in range(160):
    lo = 16 * i
    x, y = bands[lo : lo + 16], pitch[lo : lo + 16]
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        y_hat = top(net(x)).squeeze(1)
    error = (y_hat.float() - y).square().mean()
    scaler.scale(LOSS_WEIGHT * error).backward()
    scaler.step(opt)
    s = scaler.get_scale()
    scaler.update()
    ok = scaler.get_scale() >= s
    taken, skipped = taken + ok, skipped + (not ok)
    errors.append(y_hat.detach().float().sub(y).square().median().item())

out = {
    "first_loss": sum(errors[:10]) / 10,
    "last_loss": sum(errors[-10:]) / 10,
    "scale": scaler.get_scale(),
    "taken": taken,
    "skipped": skipped,
}
print(json.dumps(out))
