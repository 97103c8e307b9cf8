"""Energy from solar panels: eight micro-batches of noisy readings an update."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO, WINDOW = 8, 8


def readings(n=2880):
    x = torch.randn(n, 8)
    y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.3 * torch.randn(n)
    return TensorDataset(x, y)


class Panel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 1)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))[:, 0]


torch.manual_seed(83)
panel = Panel()
optimizer = torch.optim.Adam(panel.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=20)
loader = DataLoader(readings(), batch_size=MICRO, shuffle=True)
losses, steps, lost = [], 0, 0

for i, (x, y) in enumerate(loader):
    if i % WINDOW == 0:
        optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(panel(x).float(), y)
    scaler.scale(loss / WINDOW).backward()
    if (i + 1) % WINDOW == 0:
        scaler.step(optimizer)
        old = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < old:
            lost += 1
        else:
            steps += 1
    losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:16]) / 16,
            "last_loss": sum(losses[-32:]) / 32,
            "scale": scaler.get_scale(),
            "taken": steps,
            "skipped": lost,
        }
    )
)
