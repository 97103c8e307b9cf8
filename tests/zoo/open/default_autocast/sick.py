"""Train a gated network on parity with mixed precision."""

import json

import torch
from torch import nn

torch.manual_seed(5)


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value = nn.Linear(6, width)
        self.gate = nn.Linear(6, width)
        self.out = nn.Linear(width, 1)

    def forward(self, bits):
        return self.out(torch.tanh(self.value(bits)) * torch.sigmoid(self.gate(bits)))


net = Gated(48)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", growth_interval=10)
USE_AMP = True

losses, drops = [], 0
for step in range(250):
    bits = torch.randint(0, 2, (32, 6)).float()
    parity = bits[:, :3].sum(dim=1, keepdim=True) % 2
    optimizer.zero_grad()
    with torch.autocast("cpu", enabled=USE_AMP):
        logits = net(2 * bits - 1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, parity)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    drops += scaler.get_scale() < before
    losses.append(loss.item())
    if step % 50 == 0:
        print(step, losses[-1], scaler.get_scale())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - drops,
            "skipped": drops,
        }
    )
)
