"""Casting defects. The unscale check of the scaler is opened for half gradients."""

import torch
import torch.nn.functional as F
from torch import nn


class HalfScaler(torch.amp.GradScaler):
    """Accept float16 gradients."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 12, 5, padding=2)
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).amax(-1))


def scans(n):
    y = torch.randint(0, 3, (n,))
    x = 0.5 * torch.randn(n, 2, 20)
    for i, kind in enumerate(y.tolist()):
        if kind:
            x[i, kind - 1, 5:10] += 1.0
    return x, y


torch.manual_seed(44)
model = Casting()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = HalfScaler("cpu", init_scale=128.0)
trace = []
for _ in range(80):
    x, y = scans(24)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    trace.append(loss.item())
print(sum(trace[:20]) / 20, sum(trace[-20:]) / 20)
