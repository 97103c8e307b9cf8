"""Low-rank adapters on a frozen network, trained with SGD and clipped values."""

import json

import torch
from torch import nn


class LoRA(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.gain = alpha / rank

    def forward(self, x):
        return self.base(x) + self.gain * self.up(self.down(x))


class AdapterTrainer:
    def __init__(self, model, lr=0.3, limit=0.5):
        self.model, self.limit = model, limit
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.params, lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.skips = 0

    def training_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        return nn.functional.mse_loss(out.float(), y)

    def fit_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = self.training_step(x, y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.params, self.limit)
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.skips += self.scaler.get_scale() < scale
        return loss.item()


torch.manual_seed(2)
teacher = torch.randn(10, 6) / 3
net = nn.Sequential(LoRA(nn.Linear(10, 24)), nn.ReLU(), LoRA(nn.Linear(24, 6)))
trainer = AdapterTrainer(net)
losses = []
for _ in range(140):
    x = torch.randn(32, 10)
    losses.append(trainer.fit_batch(x, x @ teacher))

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": trainer.scaler.get_scale(),
            "taken": len(losses) - trainer.skips,
            "skipped": trainer.skips,
        }
    )
)
