"""Speaker embeddings: mean and deviation over time (statistics pooling)."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class StatsPool(nn.Module):
    def forward(self, x):
        mean = x.mean(-1)
        std = torch.sqrt(x.pow(2).mean(-1) - mean.pow(2))
        return torch.cat([mean, std], -1)


class XVector(nn.Module):
    def __init__(self, speakers=4):
        super().__init__()
        self.frames = nn.Conv1d(6, 16, 3)
        self.pool = StatsPool()
        self.segment = nn.Linear(32, 16)
        self.who = nn.Linear(16, speakers)

    def forward(self, x):
        z = self.pool(self.frames(x))
        return self.who(F.relu(self.segment(z)))


torch.manual_seed(61)
voices = torch.randn(4, 6)
net = XVector()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(100):
    who = torch.randint(0, 4, (12,))
    x = voices[who][:, :, None] + 0.5 * torch.randn(12, 6, 20)
    if step % 5 == 3:
        # A stationary hum: constant over time.
        x[0] = 2.0 * voices[who[0]][:, None]
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), who)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
