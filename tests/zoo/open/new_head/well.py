"""Fine-tune a pretrained network on a new task with another number of classes."""

import json

import torch
from torch import nn
from torch.nn import functional as F


class Backbone(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Linear(20, 32)
        self.block = nn.Linear(32, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        h = F.relu(self.stem(x))
        return self.head(h + F.relu(self.block(h)))


torch.manual_seed(0)
model = Backbone(classes=10)
for p in model.stem.parameters():
    p.requires_grad_(False)
model.head = nn.Linear(32, 4)
nn.init.zeros_(model.head.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
start = {n: p.detach().clone() for n, p in model.named_parameters()}

task = torch.randn(20, 4)
losses = []
taken = skipped = 0
for step in range(150):
    x = torch.randn(32, 20)
    y = (x @ task).argmax(1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.3f}")

moved = {
    n: not torch.equal(start[n], p)
    for n, p in model.named_parameters()
    if n.startswith("head")
}
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-5:]) / 5,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
            "moved": moved,
        }
    )
)
