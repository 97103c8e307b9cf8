"""Fine-tuning in two phases: the head alone, then everything at a lower rate."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(61)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(12)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x))).mean((2, 3))


class Model(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


flowers = torch.randn(5, 1, 8, 8)


def batch(n, classes):
    y = torch.randint(0, classes, (n,))
    return flowers[y] + 0.7 * torch.randn(n, 1, 8, 8), y


def fit(model, params, lr, steps, classes, scaler, frozen=False):
    optimizer = torch.optim.AdamW(params, lr=lr)
    for step in range(steps):
        model.train()
        if frozen:
            model.backbone.eval()
        x, y = batch(12, classes)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 15 == 0:
            print(f"  {step} {loss.item():.4f}")


scaler = torch.amp.GradScaler("cpu")
model = Model(3)
print("pretraining")
fit(model, model.parameters(), 1e-2, 40, 3, scaler)

model.head = nn.Linear(12, 5)
print("phase 1: head")
for p in model.backbone.parameters():
    p.requires_grad = False
fit(model, model.head.parameters(), 2e-2, 30, 5, scaler, frozen=True)

print("phase 2: all")
for p in model.backbone.parameters():
    p.requires_grad = True
groups = [
    {"params": model.backbone.parameters(), "lr": 1e-3},
    {"params": model.head.parameters()},
]
fit(model, groups, 4e-3, 40, 5, scaler)
