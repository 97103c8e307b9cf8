"""Water level forecast; unscale, clip, step."""

import torch
from torch import nn

torch.manual_seed(40)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv1d(1, 16, 5, padding=2)
        self.mid = nn.Conv1d(16, 16, 5, padding=2)
        self.out = nn.Linear(16 * 24, 1)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        x = torch.relu(self.mid(x))
        return self.out(x.flatten(1))


def levels(n):
    phase = torch.rand(n, 1) * 6.28
    t = torch.arange(25)[None] * 0.4
    wave = torch.sin(t + phase) * 12 + torch.randn(n, 25)
    return wave[:, None, :24], wave[:, 24:]


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []
for _ in range(110):
    x, y = levels(16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = (pred.float() - y).square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scaler.update()
    losses.append(loss.item())
print(losses[0], losses[-1])
