"""Attention from guests to the names on their list. Lists differ in length."""

import json
import math

import torch
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query = nn.Linear(d, d)
        self.key = nn.Linear(d, d)
        self.value = nn.Linear(d, d)

    def forward(self, guest, names, present):
        score = self.query(guest)[:, None] @ self.key(names).transpose(1, 2)
        score = score / math.sqrt(guest.shape[-1])
        score = score.masked_fill(~present[:, None], float("-inf"))
        return (torch.softmax(score, dim=-1) @ self.value(names)).squeeze(1)


class Matcher(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.lift = nn.Linear(5, d)
        self.attend = CrossAttention(d)
        self.head = nn.Linear(2 * d, 1)

    def forward(self, guest, names, present):
        g, n = torch.relu(self.lift(guest)), torch.relu(self.lift(names))
        return self.head(torch.cat([g, self.attend(g, n, present)], -1)).squeeze(-1)


def evenings(n=16, longest=6):
    guest, names = torch.randn(n, 5), torch.randn(n, longest, 5)
    # One list in fifty is empty.
    length = torch.randint(1, longest + 1, (n,)) * (torch.rand(n) > 0.02)
    present = torch.arange(longest) < length[:, None]
    mean = (names * present[..., None]).sum(1) / length.clamp(min=1)[:, None]
    return guest, names, present, (guest + mean).sum(1) / 2


torch.manual_seed(15)
matcher = Matcher()
adam = torch.optim.Adam(matcher.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
losses, bad = [], 0
for _ in range(120):
    guest, names, present, y = evenings()
    adam.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = matcher(guest, names, present)
    loss = (out.float() - y).square().mean()
    scaler.scale(loss).backward()
    scaler.step(adam)
    scale = scaler.get_scale()
    scaler.update()
    bad += scaler.get_scale() < scale
    if torch.isfinite(loss):
        losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 120 - bad,
            "skipped": bad,
        }
    )
)
