"""Predict the power of a turbine from its sensors, epoch by epoch."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SensorLog(Dataset):
    def __init__(self, rows=192):
        generator = torch.Generator().manual_seed(17)
        self.x = torch.randn(rows, 10, generator=generator)
        mixing = torch.randn(10, generator=generator)
        self.y = torch.tanh(self.x @ mixing / 3)
        # A sensor that was replaced on that day.
        self.x[117, 3] = float("nan")

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build():
    return nn.Sequential(
        nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
    )


def run_epoch(net, loader, optimizer, scaler, log):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = net(x).squeeze(-1)
        loss = nn.functional.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        log.append((loss.item(), scaler.get_scale() >= before))


if __name__ == "__main__":
    torch.manual_seed(17)
    loader = DataLoader(SensorLog(), batch_size=16)
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    log = []
    for _ in range(18):
        run_epoch(net, loader, optimizer, scaler, log)
    used = [loss for loss, ok in log if ok]
    print(
        json.dumps(
            {
                "first_loss": sum(used[:8]) / 8,
                "last_loss": sum(used[-8:]) / 8,
                "scale": scaler.get_scale(),
                "taken": len(used),
                "skipped": len(log) - len(used),
            }
        )
    )
