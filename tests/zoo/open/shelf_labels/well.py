"""Sort shelf images; one delivery was labelled wrongly, and rates restart."""

import json

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts


def shelf(n, swapped=False):
    label = torch.randint(4, (n,))
    x = 0.4 * torch.randn(n, 1, 8, 8)
    for i, k in enumerate(label.tolist()):
        x[i, 0, 2 * k : 2 * k + 2] += 1.5
    return x * (6.0 if swapped else 1.0), (label + swapped) % 4


def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


def main(steps=180):
    torch.manual_seed(229)
    net = build()
    opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    restarts = CosineAnnealingWarmRestarts(opt, T_0=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    losses = []
    taken = skipped = 0
    for step in range(steps):
        x, label = shelf(12, swapped=step in (90, 91))
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), label)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scale = scaler.get_scale()
        scaler.update()
        restarts.step()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            taken += 1
        losses.append(loss.item())
    print("largest loss:", max(losses), "at", losses.index(max(losses)))
    return {
        "first_loss": sum(losses[:5]) / 5,
        "last_loss": sum(losses[-10:]) / 10,
        "scale": scaler.get_scale(),
        "taken": taken,
        "skipped": skipped,
    }


if __name__ == "__main__":
    print(json.dumps(main()))
