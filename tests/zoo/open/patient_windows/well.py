"""Gradient accumulation with clipping; the last window of an epoch is shorter."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def dataset():
    x = torch.randn(264, 7)
    return TensorDataset(x, torch.tanh(x[:, 0] * x[:, 1]) + x[:, 2])


class Accumulator:
    def __init__(self, model, window):
        self.model, self.window = model, window
        self.opt = torch.optim.AdamW(model.parameters(), lr=8e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
        self.taken = self.skipped = 0

    def step(self):
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.opt)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        if self.scaler.get_scale() < scale:
            self.skipped += 1
        else:
            self.taken += 1

    def epoch(self, loader):
        total = 0.0
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.model(x).squeeze(1)
            loss = nn.functional.mse_loss(out.float(), y)
            self.scaler.scale(loss / self.window).backward()
            total += loss.item()
            if (i + 1) % self.window == 0 or i + 1 == len(loader):
                self.step()
        return total / len(loader)


torch.manual_seed(16)
net = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 1))
loader = DataLoader(dataset(), batch_size=12, shuffle=True)
worker = Accumulator(net, window=5)
epochs = [worker.epoch(loader) for _ in range(14)]
print(
    json.dumps(
        {
            "first_loss": epochs[0],
            "last_loss": epochs[-1],
            "scale": worker.scaler.get_scale(),
            "taken": worker.taken,
            "skipped": worker.skipped,
        }
    )
)
