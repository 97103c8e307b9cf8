"""Link prediction: are two people friends? Inner products of node codes."""

import json

import torch
from torch import nn


class NodeCodes(nn.Module):
    def __init__(self, people, dim=16):
        super().__init__()
        self.table = nn.Embedding(people, dim)
        self.lift = nn.Linear(dim, dim)

    def forward(self, a, b):
        u, v = self.lift(self.table(a)), self.lift(self.table(b))
        return (u @ v.transpose(1, 2)).flatten()


def link_loss(logit, friends):
    p = torch.sigmoid(logit).clamp(1e-6, 1 - 1e-6)
    return -(friends * p.log() + (1 - friends) * (1 - p).log()).mean()


torch.manual_seed(39)
people = 30
group = torch.arange(people) % 3
model = NodeCodes(people)
opt = torch.optim.Adam(model.parameters(), lr=3e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses = []
skipped = 0

for _ in range(150):
    a, b = torch.randint(0, people, (2, 32))
    friends = (group[a] == group[b]).float()
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logit = model(a[:, None], b[:, None])
        loss = link_loss(logit, friends.to(logit.dtype))
    scaler.scale(loss).backward()
    scaler.step(opt)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
    losses.append(loss.item())

last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": last if last < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": 150 - skipped,
            "skipped": skipped,
        }
    )
)
