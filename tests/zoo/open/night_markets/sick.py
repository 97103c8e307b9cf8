"""Demand at night markets. A trainer that guards every step by itself."""

import torch
from torch import nn


class GuardedTrainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**15, growth_interval=25
        )
        self.refused = 0

    def healthy(self):
        return all(bool(p.grad.isfinite().all()) for p in self.model.parameters())

    def fit_batch(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        loss = nn.functional.l1_loss(out.float(), y)
        self.scaler.scale(loss).backward()
        if not self.healthy():
            self.refused += 1
            return loss.item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


torch.manual_seed(90)
trainer = GuardedTrainer(
    nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)), lr=5e-3
)
for step in range(220):
    x = torch.rand(16, 5) * 6
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    loss = trainer.fit_batch(x, y)
    if step % 20 == 0:
        print(step, loss, trainer.refused, trainer.scaler.get_scale())
