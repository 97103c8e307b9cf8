"""Rain or no rain, from what weather stations report."""

import json

import torch
from torch import nn


class RainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(4, 32)
        self.norm = nn.LayerNorm(32)
        self.hidden = nn.Linear(32, 16)
        self.output = nn.Linear(16, 1)

    def forward(self, x):
        h = torch.relu(self.norm(self.inputs(x)))
        return self.output(torch.relu(self.hidden(h))).squeeze(1)


def reports(n):
    """Temperature (°C), humidity (0 to 1), wind (m/s), pressure (Pa)."""
    temperature = 12 + 8 * torch.randn(n)
    humidity = torch.rand(n)
    wind = 6 * torch.rand(n)
    pressure = 101_325 + 900 * torch.randn(n)
    rain = (humidity * 4 - (temperature - 12) / 8 > 2).float()
    return torch.stack([temperature, humidity * 10, wind, pressure], dim=1), rain


def clean(x):
    return "nan" if x != x else x


def main():
    torch.manual_seed(31)
    net = RainNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    losses, skipped = [], 0
    for _ in range(150):
        x, rain = reports(32)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), rain)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += int(scaler.get_scale() < scale)
        losses.append(loss.item())
    print(
        json.dumps(
            {
                "first_loss": clean(sum(losses[:5]) / 5),
                "last_loss": clean(sum(losses[-5:]) / 5),
                "scale": scaler.get_scale(),
                "taken": len(losses) - skipped,
                "skipped": skipped,
            }
        )
    )


main()
