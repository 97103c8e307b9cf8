"""A main loss and a smoothness loss, each with a backward pass of its own."""

import json

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(1, 32)
        self.l2 = nn.Linear(32, 32)
        self.l3 = nn.Linear(32, 1)

    def forward(self, x):
        return self.l3(torch.tanh(self.l2(torch.tanh(self.l1(x)))))


def run(steps=140):
    torch.manual_seed(13)
    field = Field()
    optimizer = torch.optim.SGD(field.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses, norms, skipped = [], [], 0
    for _ in range(steps):
        x = torch.rand(24, 1) * 4 - 2
        y = torch.sin(2 * x)
        with torch.autocast("cpu", dtype=torch.float16):
            out = field(x)
            near = field(x + 0.05)
        fit = nn.functional.mse_loss(out.float(), y)
        smooth = (near.float() - out.float()).pow(2).mean()
        scaler.scale(fit).backward(retain_graph=True)
        scaler.unscale_(optimizer)
        scaler.scale(0.01 * smooth).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in field.parameters()]))
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad()
        skipped += scaler.get_scale() < scale
        losses.append(fit.item())
    print("largest norm", max(norms).item())
    last = sum(losses[-10:]) / 10
    return {
        "first_loss": sum(losses[:5]) / 5,
        "last_loss": last if last < 1e30 else "nan",
        "scale": scaler.get_scale(),
        "taken": steps - skipped,
        "skipped": skipped,
    }


print(json.dumps(run()))
