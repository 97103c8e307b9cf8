"""Few labels and many images without: a supervised and a consistency pass."""

import json

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(8 * 16, 32)
        self.cls = nn.Linear(32, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.cls(F.relu(self.fc(x.flatten(1))))


def crops(labels):
    x = 0.3 * torch.randn(len(labels), 1, 10, 10)
    for i, label in enumerate(labels.tolist()):
        r, c = divmod(label, 2)
        x[i, 0, 5 * r : 5 * r + 5, 5 * c : 5 * c + 5] += 1.0
    return x


def supervised(net, optimizer, scaler):
    labels = torch.randint(4, (12,))
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(crops(labels))
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    return loss.item()


def consistency(net, optimizer, scaler):
    x = crops(torch.randint(4, (12,)))
    optimizer.zero_grad(set_to_none=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        target = net(x).float().softmax(-1)
    with torch.autocast("cpu", dtype=torch.float16):
        noisy = net(x + 0.1 * torch.randn_like(x))
    loss = 0.1 * (noisy.float().softmax(-1) - target).pow(2).mean()
    scaler.scale(loss).backward()


torch.manual_seed(109)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
losses, skipped = [], 0
for _ in range(140):
    losses.append(supervised(net, optimizer, scaler))
    consistency(net, optimizer, scaler)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += int(scaler.get_scale() < scale)

print(
    json.dumps(
        {
            "first_loss": sum(losses[:6]) / 6,
            "last_loss": sum(losses[-6:]) / 6,
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
