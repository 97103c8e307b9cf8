"""Online learning of a signal that is disturbed for a moment."""

import json

import torch
from torch import nn

torch.manual_seed(30)


class Filter(nn.Module):
    def __init__(self, taps):
        super().__init__()
        self.lstm = nn.LSTMCell(taps, 24)
        self.readout = nn.Linear(24, 1)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.readout(h)


taps = 8
kernel = torch.randn(taps, 1) / taps**0.5
net = Filter(taps)
opt = torch.optim.Adam(net.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
errors, taken, skipped, patience, best = [], 0, 0, 0, float("inf")
for t in range(400):
    x = torch.randn(24, taps)
    y = torch.tanh(x @ kernel)
    if t in (120, 121):
        y = y + 30.0
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
        for name, p in net.named_parameters():
            shadow[name].lerp_(p.detach(), 0.05)
    errors.append(loss.item())
    if t % 50 == 0:
        print(t, errors[-1], scaler.get_scale())
    if t % 20 == 19:
        recent = sum(errors[-20:]) / 20
        patience = 0 if recent < best else patience + 1
        best = min(best, recent)
        if patience == 6:
            print("no better since", t - 120)
            break

print(
    json.dumps(
        {
            "first_loss": sum(errors[:5]) / 5,
            "last_loss": sum(errors[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
