"""Ingredients with sparse gradients: one optimizer for them, one for the rest."""

import json

import torch
from torch import nn


class Recipes(nn.Module):
    def __init__(self, words=80, dim=12):
        super().__init__()
        self.words = nn.Embedding(words, dim, sparse=True)
        self.mix = nn.Linear(dim, 24)
        self.taste = nn.Linear(24, 1)

    def forward(self, ids):
        return self.taste(torch.relu(self.mix(self.words(ids).mean(1)))).squeeze(1)


torch.manual_seed(32)
sweet = torch.randn(80)
model = Recipes()
dense = [*model.mix.parameters(), *model.taste.parameters()]
opt_sparse = torch.optim.SparseAdam(list(model.words.parameters()), lr=2e-2)
opt_dense = torch.optim.Adam(dense, lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skipped = [], 0
for _ in range(150):
    ids = torch.randint(0, 80, (24, 4))
    opt_sparse.zero_grad()
    opt_dense.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(ids)
    loss = nn.functional.mse_loss(out.float(), sweet[ids].mean(1) * 2)
    scaler.scale(loss).backward()
    scaler.step(opt_sparse)
    scaler.step(opt_dense)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 150 - skipped,
            "skipped": skipped,
        }
    )
)
