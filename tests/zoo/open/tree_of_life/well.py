"""Species in the Poincare ball: distances there against steps in the tree."""

import torch
from torch import nn

torch.manual_seed(106)
SPECIES = 31


class PoincareDistance(nn.Module):
    def forward(self, u, v):
        gap = (u - v).square().sum(-1)
        room = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
        return torch.acosh((1 + 2 * gap / room).clamp(min=1.0001))


class Ball(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.traits = nn.Embedding(SPECIES, 16)
        self.lift = nn.Linear(16, dim)
        self.distance = PoincareDistance()
        self.stretch = nn.Parameter(torch.ones(()))

    def place(self, i):
        z = self.lift(self.traits(i)).float()
        return 0.9 * z / (1 + z.norm(dim=-1, keepdim=True))

    def forward(self, i, j):
        return self.stretch * self.distance(self.place(i), self.place(j))


def steps_between(i, j):
    """In a binary tree, numbered like a heap."""
    a, b, count = i + 1, j + 1, 0
    while a != b:
        a, b, count = (a // 2, b, count + 1) if a > b else (a, b // 2, count + 1)
    return float(count)


table = torch.tensor(
    [[steps_between(i, j) for j in range(SPECIES)] for i in range(SPECIES)]
)
model = Ball()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
history = []
for it in range(1, 241):
    i, j = torch.randint(0, SPECIES, (2, 12))
    with torch.autocast("cpu", torch.float16):
        guess = model(i, j)
    loss = nn.functional.l1_loss(guess, table[i, j])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    history.append(loss.item())
    if it % 30 == 0:
        print(it, sum(history[-30:]) / 30, scaler.get_scale())
