"""Add up the marked numbers of sequences that get longer, with a recurrent network."""

import json
import math

import torch
from torch import nn

WIDTH = 32


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(2, WIDTH)
        self.carry = nn.Linear(WIDTH, WIDTH, bias=False)
        self.answer = nn.Linear(WIDTH, 1)
        nn.init.orthogonal_(self.carry.weight, gain=1.0)

    def forward(self, sequences):
        state = torch.zeros(len(sequences), WIDTH)
        for entries in sequences.unbind(dim=1):
            state = torch.tanh(self.read(entries) + self.carry(state))
        return self.answer(state).squeeze(-1)


torch.manual_seed(0)
model = Recurrence()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(360):
    # Short ones first, then longer and longer ones.
    length = 8 + max(0, step - 240) // 2
    numbers = torch.rand(8, length)
    marks = (torch.rand(8, length) < 0.2).float()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        sums = model(torch.stack([numbers, marks], dim=-1))
        loss = nn.functional.mse_loss(sums, (numbers * marks).sum(dim=1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, loss.item(), norm.item(), scaler.get_scale())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
