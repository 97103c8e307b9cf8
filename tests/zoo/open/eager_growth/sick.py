"""Segment a noisy step signal with a one-dimensional U-shaped network."""

import json

import torch
from torch import nn

torch.manual_seed(13)


def down(i, o):
    return nn.Sequential(nn.Conv1d(i, o, 3, stride=2, padding=1), nn.ReLU())


class UNet1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2 = down(1, 8), down(8, 16)
        self.up = nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1)
        self.last = nn.ConvTranspose1d(16, 1, 4, stride=2, padding=1)

    def forward(self, x):
        a = self.d1(x)
        b = torch.relu(self.up(self.d2(a)))
        return self.last(torch.cat([a, b], dim=1))


def batch(n=8, length=16):
    edge = torch.randint(2, length - 2, (n, 1))
    mask = (torch.arange(length) >= edge).float().unsqueeze(1)
    return mask + 0.5 * torch.randn(n, 1, length), mask


unet = UNet1d()
opt = torch.optim.AdamW(unet.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", growth_interval=1)
losses, taken, skipped = [], 0, 0
for i in range(160):
    signal, mask = batch()
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.binary_cross_entropy_with_logits(unet(signal), mask)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())
    if i % 40 == 0:
        print(i, losses[-1])
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
