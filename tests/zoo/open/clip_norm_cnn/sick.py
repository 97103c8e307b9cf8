"""Classify 8x8 pictures of bars with a small convolutional network."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)


def make_bars(n):
    kind = torch.randint(0, 3, (n,))
    where = torch.randint(0, 8, (n,))
    images = 0.5 * torch.randn(n, 1, 8, 8)
    for i in range(n):
        if kind[i] == 0:
            images[i, 0, where[i], :] += 1.0
        elif kind[i] == 1:
            images[i, 0, :, where[i]] += 1.0
        else:
            images[i, 0] += torch.eye(8)
    return images, kind


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 4)
        return self.fc(x.flatten(1))


def train_epoch(net, loader, opt, scaler, log):
    for images, labels in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        log.append((loss.item(), scaler.get_scale() >= before))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
loader = DataLoader(TensorDataset(*make_bars(256)), batch_size=16, shuffle=True)
log = []
for epoch in range(8):
    train_epoch(net, loader, opt, scaler, log)
    print(f"epoch {epoch}: {log[-1][0]:.4f}")

losses, steps = zip(*log, strict=True)
print(
    json.dumps(
        {
            "first_loss": sum(losses[:8]) / 8,
            "last_loss": sum(losses[-8:]) / 8,
            "scale": scaler.get_scale(),
            "taken": sum(steps),
            "skipped": len(steps) - sum(steps),
        }
    )
)
