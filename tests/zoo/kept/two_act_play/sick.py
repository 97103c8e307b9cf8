"""Train the head first, then thaw the backbone half-way."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(81)


class Play(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU()
        )
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


roles = torch.randn(4, 12)


def scene(n=24):
    y = torch.randint(0, 4, (n,))
    sign = torch.randint(0, 2, (n, 1)) * 2.0 - 1
    return sign * roles[y] + 0.3 * torch.randn(n, 12), y


model = Play()
model.backbone.requires_grad_(False)
optimizer = torch.optim.Adam(
    filter(lambda p: p.requires_grad, model.parameters()), lr=5e-3
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(160):
    if step == 40:
        model.backbone.requires_grad_(True)
        print("second act: the backbone trains too")
    x, y = scene()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        moved = model.backbone[0].weight.sum().item()
        print(step, f"{loss.item():.4f} backbone {moved:.5f}")
