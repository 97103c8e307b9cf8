"""A trainer with one method for each phase of a step."""

import json

import torch
from torch import nn


class Trainer:
    def __init__(self, model, optimizer, loss_fn):
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.scaler = torch.amp.GradScaler("cpu")
        self.losses = []
        self.counts = {"taken": 0, "skipped": 0}

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.loss_fn(self.model(x), y)

    def backward(self, loss):
        self.clear()
        self.scaler.scale(loss).backward()

    def apply(self):
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        taken = self.scaler.get_scale() >= scale
        self.counts["taken" if taken else "skipped"] += 1

    def clear(self):
        self.model.zero_grad(set_to_none=False)

    def run(self, batches):
        for x, y in batches:
            loss = self.forward(x, y)
            self.backward(loss)
            self.apply()
            self.losses.append(loss.item())


def rings(n):
    for _ in range(n):
        label = torch.randint(0, 2, (24,))
        angle = 6.2832 * torch.rand(24)
        radius = 0.5 + label + 0.15 * torch.randn(24)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        yield points, label


torch.manual_seed(6)
classifier = nn.Sequential(
    nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)
)
trainer = Trainer(
    classifier,
    torch.optim.AdamW(classifier.parameters(), lr=1e-2, weight_decay=1e-4),
    nn.CrossEntropyLoss(),
)
for epoch in range(6):
    trainer.run(rings(30))
    print(f"epoch {epoch} loss {trainer.losses[-1]:.4f}")
print(
    json.dumps(
        {
            "first_loss": sum(trainer.losses[:5]) / 5,
            "last_loss": sum(trainer.losses[-10:]) / 10,
            "scale": trainer.scaler.get_scale(),
            **trainer.counts,
        }
    )
)
