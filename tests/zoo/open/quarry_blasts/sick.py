"""Seismic triggers: blast or not."""

import torch
from torch import nn

torch.manual_seed(70)


def windows(n):
    y = torch.randint(0, 2, (n, 1)).float()
    t = torch.arange(32)
    blast = torch.exp(-((t - 16.0) ** 2) / 20)
    return 0.7 * torch.randn(n, 1, 32) + y[:, :, None] * blast, y


net = nn.Sequential(
    nn.Conv1d(1, 8, 7, padding=3),
    nn.ReLU(),
    nn.AvgPool1d(4),
    nn.Flatten(),
    nn.Linear(64, 1),
)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
for _step in range(80):
    x, y = windows(16)
    opt.zero_grad()
    with torch.autocast("cpu"):
        logit = net(x)
    loss = nn.functional.binary_cross_entropy_with_logits(logit.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print("last", loss.item())
