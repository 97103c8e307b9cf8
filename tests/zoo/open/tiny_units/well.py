"""Learn currents of some microamperes with a scale that fits them."""

import json

import torch
from torch import nn

torch.manual_seed(3)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 32)
        self.outer = nn.Linear(32, 1)
        nn.init.zeros_(self.outer.bias)
        nn.init.normal_(self.outer.weight, std=1e-4)

    def forward(self, v):
        return self.outer(torch.tanh(self.inner(v)))


cell = Cell()
conductance = torch.randn(4, 1)
opt = torch.optim.Adam(cell.parameters(), lr=3e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
losses, fell = [], 0
for step in range(300):
    v = torch.randn(32, 4)
    current = 2e-3 * torch.tanh(v @ conductance)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = cell(v)
    loss = nn.functional.mse_loss(out.float(), current)
    scaler.scale(loss).backward()
    scaler.step(opt)
    before = scaler.get_scale()
    scaler.update()
    fell += scaler.get_scale() < before
    losses.append(loss.item())
    if step % 50 == 0:
        print(step, losses[-1], scaler.get_scale())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - fell,
            "skipped": fell,
        }
    )
)
