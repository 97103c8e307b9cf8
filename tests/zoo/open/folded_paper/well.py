"""Creases of paper; rounds of nine steps on a fold of cross-validation."""

import torch
from torch import nn

torch.manual_seed(551)
X = torch.randn(120, 6)
Y = 40 * (X[:, :1] * X[:, 1:2]) + 10 * X[:, 2:3]
FOLDS = 5


class Fold:
    def __init__(self, number):
        self.train = [i for i in range(120) if i % FOLDS != number]
        self.model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu")

    def some_steps(self, n=9):
        self.model.train()
        lost = 0
        for _ in range(n):
            rows = torch.tensor(self.train)[torch.randint(0, len(self.train), (24,))]
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.model(X[rows])
            loss = (out.float() - Y[rows]).square().mean()
            self.scaler.scale(loss).backward()
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            lost += self.scaler.get_scale() < before
        return loss.item(), lost


fold = Fold(0)
for round_ in range(20):
    loss, lost = fold.some_steps()
    if round_ % 4 == 3:
        print(round_ + 1, loss, "lost", lost)
