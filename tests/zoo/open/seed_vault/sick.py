"""Germination rates: the embeddings have an optimizer of their own, the net another."""

import torch
import torch.nn.functional as F
from torch import nn

SPECIES, SITES = 12, 7


class Germination(nn.Module):
    def __init__(self):
        super().__init__()
        self.species = nn.Embedding(SPECIES, 6)
        self.sites = nn.Embedding(SITES, 6)
        self.score = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, species, site):
        z = torch.cat([self.species(species), self.sites(site)], -1)
        return self.score(z).squeeze(-1)


torch.manual_seed(9)
truth = torch.randn(SPECIES, SITES)
model = Germination()
tables = torch.optim.SGD(
    [*model.species.parameters(), *model.sites.parameters()], lr=0.1
)
dense = torch.optim.SGD(model.score.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for step in range(140):
    a, b = torch.randint(SPECIES, (32,)), torch.randint(SITES, (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(a, b)
    loss = F.mse_loss(pred.float(), truth[a, b])
    tables.zero_grad()
    dense.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(dense)
    tables.step()
    scaler.update()
    if step % 20 == 0:
        print(f"{step} {loss.item():.4f}")
