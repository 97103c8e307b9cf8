"""Encoder and decoder of gestures, trained jointly."""

import json

import torch
from torch import nn


class Gesture(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(15, 24), nn.ReLU(), nn.Linear(24, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 15))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def gestures(n, basis):
    # Now and then a sensor slips.
    slip = torch.where(torch.rand(n, 1) < 0.0006, 2000.0, 1.0)
    return slip * torch.randn(n, 4) @ basis


torch.manual_seed(87)
basis = torch.randn(4, 15)
net = Gesture()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skips = [], 0
for _epoch in range(5):
    for _ in range(28):
        x = gestures(32, basis)
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x), x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        before = scaler.get_scale()
        scaler.update()
        skips += scaler.get_scale() < before
        losses.append(loss.item())

end = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": end if end < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": len(losses) - skips,
            "skipped": skips,
        }
    )
)
