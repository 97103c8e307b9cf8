"""Identity classification with an additive angular margin."""

import json

import torch
import torch.nn.functional as F
from torch import nn


class ArcMargin(nn.Module):
    def __init__(self, dim, identities, margin=0.2, s=12.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(identities, dim))
        self.margin, self.s = margin, s

    def forward(self, features, labels):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        cosine = cosine.clamp(-1, 1)
        angle = torch.acos(cosine)
        target = F.one_hot(labels, len(self.weight)).bool()
        return self.s * torch.cos(torch.where(target, angle + self.margin, angle))


class FaceNet(nn.Module):
    def __init__(self, identities):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.PReLU(), nn.Linear(32, 4))
        self.margin = ArcMargin(4, identities)

    def forward(self, x, labels):
        return self.margin(self.backbone(x), labels)


class Trainer:
    def __init__(self, net, lr):
        self.net = net
        self.optim = torch.optim.Adam(net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu")
        self.losses = []
        self.skipped = 0

    def step(self, x, y):
        self.optim.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.net(x, y).float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        old = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < old
        self.losses.append(loss.item())

    def summary(self):
        n = len(self.losses)
        return {
            "first_loss": sum(self.losses[:10]) / 10,
            "last_loss": sum(self.losses[-10:]) / 10,
            "scale": self.scaler.get_scale(),
            "taken": n - self.skipped,
            "skipped": self.skipped,
        }


if __name__ == "__main__":
    torch.manual_seed(4)
    centres = torch.randn(10, 16)
    trainer = Trainer(FaceNet(10), lr=1e-2)
    for _ in range(250):
        who = torch.randint(10, (32,))
        trainer.step(centres[who] + 0.3 * torch.randn(32, 16), who)
    print(json.dumps(trainer.summary()))
