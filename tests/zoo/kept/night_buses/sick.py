"""Delays of night buses from time stamps and features of the line."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(71)
START = 1_700_000_000


class DelayNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trip = nn.Linear(6, 32)
        self.hidden = nn.Linear(32, 16)
        self.delay = nn.Linear(16, 1)

    def forward(self, x):
        return self.delay(F.relu(self.hidden(F.relu(self.trip(x)))))


def trips(n):
    stamp = START + torch.randint(0, 7 * 86400, (n, 1))
    line = torch.randn(n, 5)
    hour = (stamp % 86400).float() / 3600
    delay = line[:, :1] + (hour < 5).float()
    x = torch.cat([stamp.float(), line], 1)
    return x, delay


model = DelayNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(100):
    x, delay = trips(24)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = F.l1_loss(pred.float(), delay)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
