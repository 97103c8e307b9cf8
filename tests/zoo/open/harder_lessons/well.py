"""Sorting network learns to find the largest of ever more numbers."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(140)


class Pointer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.lift = nn.Linear(1, dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1)

    def forward(self, x):
        z = F.relu(self.lift(x.unsqueeze(-1)))
        q = self.query(z.mean(1, keepdim=True))
        return self.score(torch.tanh(self.key(z) + q)).squeeze(-1)


net = Pointer()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for lesson, count in enumerate((2, 4, 8, 16, 32)):
    for step in range(45):
        x = torch.randn(32, count)
        with torch.autocast("cpu", dtype=torch.float16):
            score = net(x)
        loss = F.cross_entropy(score.float(), x.argmax(1))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step in (0, 44):
            print(f"lesson {lesson} step {step} loss {loss.item():.4f}")
