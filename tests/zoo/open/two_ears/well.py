"""Loudness from both ears: two micro-batches, left and right, make one update."""

import json

import torch
from torch import nn


class Trainer:
    def __init__(self, model, ears=("left", "right")):
        self.model, self.ears = model, ears
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.6)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
        self.taken = self.skipped = 0

    def micro_batch(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x).squeeze(1)
        loss = nn.functional.mse_loss(out.float(), y)
        self.scaler.scale(loss / len(self.ears)).backward()
        return loss.item()

    def finish(self):
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() < scale:
            self.skipped += 1
        else:
            self.taken += 1

    def update(self, sounds):
        self.optimizer.zero_grad()
        total = 0.0
        for ear in self.ears:
            total += self.micro_batch(*sounds(ear))
        self.finish()
        return total / len(self.ears)


def sounds(ear, n=64):
    x = 0.5 * torch.randn(n, 4)
    loud = x @ torch.tensor([4.0, -4, 3, 2])
    # The left ear hears more than the right one.
    return x, loud + (2 if ear == "left" else -2)


torch.manual_seed(17)
trainer = Trainer(nn.Linear(4, 1))
losses = [trainer.update(sounds) for _ in range(80)]
last = sum(losses[-20:]) / 20
print(
    json.dumps(
        {
            "first_loss": losses[0],
            "last_loss": last if last < 1e30 else "nan",
            "scale": trainer.scaler.get_scale(),
            "taken": trainer.taken,
            "skipped": trainer.skipped,
        }
    )
)
