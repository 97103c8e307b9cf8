"""A frame of vectors that shall be orthogonal; the penalty goes backward on its own."""

import torch
from torch import nn

torch.manual_seed(511)


class Frame(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.Linear(12, 8, bias=False)
        self.out = nn.Linear(8, 12, bias=False)

    def forward(self, x):
        return self.out(self.vectors(x))

    def penalty(self):
        w = self.vectors.weight
        return (w @ w.T - torch.eye(8)).square().sum()


frame = Frame()
optimizer = torch.optim.Adam(frame.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
cloud = torch.randn(12, 12) * torch.logspace(0, -1, 12)
for it in range(150):
    x = torch.randn(20, 12) @ cloud
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        again = frame(x)
    loss = (again.float() - x).square().mean()
    scaler.scale(loss).backward()
    penalty = 0.5 * frame.penalty()
    penalty.backward()
    scaler.step(optimizer)
    scaler.update()
    if it % 30 == 0 or it == 149:
        print(it, round(loss.item(), 4), round(penalty.item(), 5))
