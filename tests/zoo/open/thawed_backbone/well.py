"""Fine-tune in two stages: the head first, then everything."""

import json

import torch
from torch import nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x)))).flatten(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(8 * 9, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def images(n):
    label = torch.randint(3, (n,))
    x = 0.5 * torch.randn(n, 1, 10, 10)
    for i, k in enumerate(label.tolist()):
        r, c = torch.randint(0, 8, (2,)).tolist()
        x[i, 0, r, c : c + 1 + k] += 2.5
        x[i, 0, r : r + 3 - k, c] += 2.5
    return x, label


torch.manual_seed(131)
clf = Classifier()
clf.backbone.requires_grad_(False)
trainable = list(clf.parameters())
optimizer = torch.optim.Adam(trainable, lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
start = {name: p.detach().clone() for name, p in clf.named_parameters()}
losses, skipped = [], 0

for step in range(220):
    if step == 50:
        clf.backbone.requires_grad_(True)
    x, label = images(16)
    clf.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = clf(x)
    loss = nn.functional.cross_entropy(logits.float(), label)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += int(scaler.get_scale() < scale)
    losses.append(loss.item())

moved = {n: not torch.equal(p, start[n]) for n, p in clf.named_parameters()}
print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
            "moved": moved,
        }
    )
)
