"""Re-use a bird classifier for other species: its last layer is replaced."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

OLD, NEW = 10, 4


class BirdNet(nn.Module):
    def __init__(self, species):
        super().__init__()
        self.song = nn.Conv1d(1, 8, 5, stride=2)
        self.features = nn.Linear(8 * 10, 32)
        self.fc = nn.Linear(32, species)

    def forward(self, x):
        x = F.relu(self.song(x[:, None])).flatten(1)
        return self.fc(F.relu(self.features(x)))


def prepare(net, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.fc = nn.Linear(net.fc.in_features, NEW)
    return optimizer


def songs(n):
    kind = torch.randint(NEW, (n,))
    t = torch.arange(23.0)
    x = torch.sin(t * (0.4 + 0.3 * kind[:, None]) + 6 * torch.rand(n, 1))
    return x + 0.3 * torch.randn(n, 23), kind


torch.manual_seed(137)
birds = BirdNet(OLD)
opt = prepare(birds, lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
begin = {k: v.clone() for k, v in birds.state_dict().items()}
curve, skipped = [], 0
for _ in range(200):
    x, kind = songs(16)
    birds.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(birds(x).float(), kind)
    scaler.scale(loss).backward()
    scaler.step(opt)
    s = scaler.get_scale()
    scaler.update()
    skipped += int(scaler.get_scale() < s)
    curve.append(loss.item())

moved = {k: bool((v != begin[k]).any()) for k, v in birds.state_dict().items()}
print(
    json.dumps(
        {
            "first_loss": sum(curve[:10]) / 10,
            "last_loss": sum(curve[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(curve) - skipped,
            "skipped": skipped,
            "moved": moved,
        }
    )
)
