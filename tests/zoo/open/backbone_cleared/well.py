"""A detector with a backbone and two heads; boxes and classes are learned together."""

import json

import torch
from torch import nn
from torch.nn import functional as F


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.box = nn.Linear(8 * 16, 2)
        self.kind = nn.Linear(8 * 16, 2)

    def forward(self, image):
        features = self.backbone(image)
        return self.box(features), self.kind(features)


def scene(n):
    image = 0.1 * torch.randn(n, 1, 8, 8)
    kind = torch.randint(2, (n,))
    at = torch.randint(1, 7, (n, 2))
    for i in range(n):
        y, x = at[i].tolist()
        image[i, 0, y, x - 1 : x + 2] += 1.0
        if kind[i]:
            image[i, 0, y - 1 : y + 2, x] += 1.0
    return image, at.float() / 8, kind


torch.manual_seed(41)
detector = Detector()
groups = [
    {"params": detector.backbone.parameters(), "lr": 2e-3},
    {"params": [*detector.box.parameters(), *detector.kind.parameters()], "lr": 4e-3},
]
optimizer = torch.optim.AdamW(groups)
grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
totals, lost = [], 0
for iteration in range(180):
    image, at, kind = scene(12)
    with torch.autocast("cpu", dtype=torch.float16):
        box, logits = detector(image)
        total = F.smooth_l1_loss(box, at) + F.cross_entropy(logits, kind)
    detector.zero_grad()
    grad_scaler.scale(total).backward()
    scale = grad_scaler.get_scale()
    grad_scaler.step(optimizer)
    grad_scaler.update()
    lost += grad_scaler.get_scale() < scale
    totals.append(total.item())
    if iteration % 30 == 0:
        print(iteration, totals[-1])

print(
    json.dumps(
        {
            "first_loss": sum(totals[:5]) / 5,
            "last_loss": sum(totals[-10:]) / 10,
            "scale": grad_scaler.get_scale(),
            "taken": len(totals) - lost,
            "skipped": lost,
        }
    )
)
