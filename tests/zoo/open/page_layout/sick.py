"""Page layout: a classifier, and a second head that finds the number of columns."""

import json

import torch
from torch import nn
from torch.nn import functional as F


class Page(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(9, 28)
        self.kind = nn.Linear(28, 4)
        self.columns = nn.Linear(28, 1)

    def forward(self, x):
        h = F.relu(self.trunk(x))
        return self.kind(h), self.columns(h).squeeze(-1)


torch.manual_seed(41)
model = Page()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
rule = torch.randn(9, 4)
column_losses, skipped = [], 0
for _ in range(130):
    x = torch.randn(24, 9)
    kind, columns = (x @ rule).argmax(1), 2 + x[:, 0] - x[:, 1]
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, guess = model(x)
    kind_loss = F.cross_entropy(logits.float(), kind)
    column_loss = F.mse_loss(guess.float(), columns)
    scaler.scale(kind_loss).backward(retain_graph=True)
    column_loss.backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    column_losses.append(column_loss.item())

print("kind", kind_loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(column_losses[:5]) / 5,
            "last_loss": sum(column_losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 130 - skipped,
            "skipped": skipped,
        }
    )
)
