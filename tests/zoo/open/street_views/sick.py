"""Depth, surface angle and confidence from one trunk, as three heads."""

import json

import torch
from torch import nn
from torch.nn import functional as F

WEIGHTS = {"depth": 1.0, "angle": 0.5, "confidence": 1e-13}


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 24))
        self.heads = nn.ModuleDict(
            {
                "depth": nn.Linear(24, 1),
                "angle": nn.Linear(24, 1),
                "confidence": nn.Linear(24, 1),
            }
        )

    def forward(self, x):
        shared = F.relu(self.trunk(x))
        return {name: head(shared).squeeze(-1) for name, head in self.heads.items()}


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.opt = torch.optim.Adam(model.parameters(), lr=lr, eps=1e-18)
        self.scaler = torch.amp.GradScaler("cpu")
        self.skipped = 0

    def losses(self, x, targets):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        return {k: F.mse_loss(out[k].float(), targets[k]) for k in targets}

    def train_step(self, x, targets):
        self.opt.zero_grad(set_to_none=True)
        losses = self.losses(x, targets)
        total = sum(WEIGHTS[k] * v for k, v in losses.items())
        self.scaler.scale(total).backward()
        self.scaler.step(self.opt)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale
        return {k: v.item() for k, v in losses.items()}


torch.manual_seed(90)
maps = {name: torch.randn(12) / 3 for name in WEIGHTS}
trainer = Trainer(Views(), lr=4e-3)
confidence = []
for _ in range(160):
    x = torch.randn(32, 12)
    targets = {name: x @ vector + 1 for name, vector in maps.items()}
    confidence.append(trainer.train_step(x, targets)["confidence"])

print(
    json.dumps(
        {
            "first_loss": sum(confidence[:10]) / 10,
            "last_loss": sum(confidence[-10:]) / 10,
            "scale": trainer.scaler.get_scale(),
            "taken": len(confidence) - trainer.skipped,
            "skipped": trainer.skipped,
        }
    )
)
