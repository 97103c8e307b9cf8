"""Energies and forces of small clusters; forces are derivatives of the predicted energy."""

import torch
from torch import nn


class Potential(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.mix = nn.Linear(width, width)
        self.energy = nn.Linear(width, 1)

    def forward(self, positions):
        i, j = torch.triu_indices(4, 4, offset=1)
        r = (positions[:, i] - positions[:, j]).square().sum(-1).add(1e-4).sqrt()
        basis = torch.exp(-((r[..., None] - torch.linspace(0.5, 3.0, 6)) ** 2) * 2)
        h = torch.nn.functional.silu(self.embed(basis))
        h = torch.nn.functional.silu(self.mix(h))
        return self.energy(h).float().sum((1, 2))


def reference(positions):
    i, j = torch.triu_indices(4, 4, offset=1)
    r = (positions[:, i] - positions[:, j]).square().sum(-1).add(1e-4).sqrt()
    return (torch.exp(-2 * (r - 1.2)) - 2 * torch.exp(-(r - 1.2))).sum(1)


def clusters(n):
    corners = torch.tensor([[0.0, 0, 0], [1.3, 0, 0], [0, 1.3, 0], [0, 0, 1.3]])
    positions = (corners + 0.25 * torch.randn(n, 4, 3)).requires_grad_()
    energy = reference(positions)
    return (
        positions.detach(),
        energy.detach(),
        -torch.autograd.grad(energy.sum(), positions)[0],
    )


torch.manual_seed(30)
model = Potential()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(150):
    positions, energy, forces = clusters(12)
    positions.requires_grad_()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(positions)
    (slope,) = torch.autograd.grad(predicted.sum(), positions, create_graph=True)
    loss = 0.1 * (predicted - energy).square().mean() + (slope + forces).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 25 == 0 or step == 149:
        print(step, f"{loss.item():.4f}")
