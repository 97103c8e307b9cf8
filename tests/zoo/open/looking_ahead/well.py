"""Lookahead (k steps forward, one back) around Adam, for leaf outlines."""

import torch
from torch import nn

torch.manual_seed(126)


class Lookahead:
    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.slow = [
            p.detach().clone() for g in inner.param_groups for p in g["params"]
        ]

    def step(self, scaler):
        scaler.step(self.inner)
        self.count += 1
        if self.count % self.k == 0:
            self.sync()

    @torch.no_grad()
    def sync(self):
        fast = [p for g in self.inner.param_groups for p in g["params"]]
        for p, slow in zip(fast, self.slow):
            slow.lerp_(p, self.alpha)
            p.copy_(slow)


class Outline(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 16, 5, padding=2, padding_mode="circular")
        self.fc1 = nn.Linear(16, 24)
        self.fc2 = nn.Linear(24, 4)

    def forward(self, xy):
        return self.fc2(torch.relu(self.fc1(torch.relu(self.conv(xy)).amax(-1))))


def leaves(n):
    y = torch.randint(0, 4, (n,))
    a = torch.linspace(0, 6.28, 24)
    r = 1 + 0.4 * torch.cos((y[:, None] + 1) * a) + 0.05 * torch.randn(n, 24)
    return torch.stack([r * a.cos(), r * a.sin()], 1), y


net = Outline()
adam = torch.optim.Adam(net.parameters(), lr=2e-2)
look = Lookahead(adam)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for i in range(150):
    xy, y = leaves(16)
    adam.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(xy)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(adam)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    look.step(scaler)
    scaler.update()
    if i % 25 == 0:
        print(i, loss.item(), scaler.get_scale())
