"""Fine-tune an encoder that was stored in half precision."""

import json

import torch
from torch import nn


class Glass(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


torch.manual_seed(73)
glass = Glass()
nn.init.normal_(glass.head.weight, std=0.5)
glass.head.requires_grad_(False)
stored = {name: p.half() for name, p in glass.encoder.state_dict().items()}
glass.encoder.load_state_dict(stored)
glass.encoder.half()
start = {n: p.detach().clone() for n, p in glass.encoder.named_parameters()}
opt = torch.optim.SGD(glass.encoder.parameters(), lr=3e-4, momentum=0.9, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
rule = 3 * torch.randn(12, 3)
losses, skipped = [], 0
for _ in range(150):
    x = torch.randn(32, 12)
    y = x @ rule
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = glass(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 150 - skipped,
            "skipped": skipped,
        }
    )
)
