"""Learn to rank documents for a query with a pairwise loss."""

import json

import torch
import torch.nn as nn

torch.manual_seed(12)
taste = torch.randn(16)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(16, 32)
        self.act = nn.ReLU()
        self.score = nn.Linear(32, 1)

    def forward(self, docs):
        return self.score(self.act(self.features(docs))).squeeze(-1)


ranker = Ranker()
opt = torch.optim.Adam(ranker.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=25)
history = []
fell = 0
for step in range(220):
    better = torch.randn(16, 16)
    worse = torch.randn(16, 16)
    swap = ((better @ taste) < (worse @ taste)).unsqueeze(1)
    better, worse = torch.where(swap, worse, better), torch.where(swap, better, worse)
    with torch.autocast("cpu", dtype=torch.float16):
        margin = ranker(better) - ranker(worse)
        loss = nn.functional.softplus(-margin).mean()
    scaler.scale(loss).backward()
    s = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    fell += scaler.get_scale() < s
    history.append(loss.item())
    if not step % 40:
        print(step, round(history[-1], 4))

print(
    json.dumps(
        {
            "first_loss": sum(history[:5]) / 5,
            "last_loss": sum(history[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(history) - fell,
            "skipped": fell,
        }
    )
)
