"""Strict clipping: a norm that is not finite is an error that is caught."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(49)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Linear(6, 32)
        self.mid = nn.Linear(32, 32)
        self.top = nn.Linear(32, 1)

    def forward(self, x):
        return self.top(F.relu(self.mid(F.relu(self.low(x)))))


model = Tower()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
max_norm, failed = 50.0, 0
for step in range(130):
    x = torch.randn(16, 6)
    y = 12 * x[:, :1] + 8 * x[:, 1:2].abs()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = F.mse_loss(pred.float(), y)
    scaler.scale(loss).backward()
    try:
        nn.utils.clip_grad_norm_(
            model.parameters(), max_norm * scaler.get_scale(), error_if_nonfinite=True
        )
    except RuntimeError:
        # This step is left out.
        failed += 1
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item(), "failed", failed)
