"""Forms with empty fields: the model replaces NaN by a learned value."""

import json

import torch
from torch import nn


class Forms(nn.Module):
    def __init__(self, fields=9):
        super().__init__()
        self.default = nn.Parameter(torch.zeros(fields))
        self.fc1 = nn.Linear(2 * fields, 28)
        self.fc2 = nn.Linear(28, 1)

    def forward(self, x):
        empty = torch.isnan(x)
        x = torch.where(empty, self.default, x)
        x = torch.cat([x, empty.float()], dim=1)
        return self.fc2(torch.relu(self.fc1(x))).squeeze(1)


torch.manual_seed(66)
forms = Forms()
opt = torch.optim.Adam(forms.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
losses, skipped = [], 0
for _ in range(140):
    full = torch.randn(32, 9)
    answer = full[:, 0] + full[:, 1] - full[:, 2]
    holes = torch.rand(32, 9) < 0.1
    x = full.masked_fill(holes, float("nan"))
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = forms(x)
    loss = nn.functional.mse_loss(out.float(), answer)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
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
