"""Distillation: the teacher is part of the module, and is never trained."""

import copy
import json

import torch
from torch import nn
from torch.nn import functional as F


class Distil(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))
        self.teacher = copy.deepcopy(self.student)
        for p in self.teacher.parameters():
            p.data.mul_(3)

    def forward(self, x):
        with torch.no_grad():
            goal = self.teacher(x)
        return self.student(x), goal


torch.manual_seed(75)
pair = Distil()
average = copy.deepcopy(pair.student)
opt = torch.optim.Adam(pair.student.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skipped = [], 0
for step in range(140):
    x = torch.randn(32, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out, goal = pair(x)
    loss = F.kl_div(
        F.log_softmax(out.float(), 1), F.softmax(goal.float(), 1), reduction="batchmean"
    )
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    with torch.no_grad():
        for slow, fast in zip(
            average.parameters(), pair.student.parameters(), strict=True
        ):
            slow.lerp_(fast, 0.05)
    if step % 35 == 34:
        # Go on from the averaged weights.
        pair.student.load_state_dict(average.state_dict())
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 140 - skipped,
            "skipped": skipped,
        }
    )
)
