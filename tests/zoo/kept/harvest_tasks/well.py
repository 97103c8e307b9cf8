"""Three tasks on one trunk, weighted by learned uncertainties (Kendall et al.)."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()
        )
        self.yield_head = nn.Linear(16, 1)
        self.crop_head = nn.Linear(16, 4)
        self.ripe_head = nn.Linear(16, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.yield_head(h), self.crop_head(h), self.ripe_head(h)


class UncertaintyLoss(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        losses = torch.stack(losses)
        return (torch.exp(-self.log_var) * losses + 0.5 * self.log_var).sum()


torch.manual_seed(90)
w = torch.randn(12, 6) / 3
model, criterion = MultiTask(), UncertaintyLoss(3)
optimizer = torch.optim.Adam(
    [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 2e-2}],
    lr=3e-3,
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(130):
    x = torch.randn(24, 12)
    z = x @ w
    crops, ripe, tons = z[:, 1:5].argmax(1), (z[:, 5:] > 0).float(), z[:, :1] * 3
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        a, b, c = model(x)
        losses = [
            F.mse_loss(a.float(), tons),
            F.cross_entropy(b.float(), crops),
            F.binary_cross_entropy_with_logits(c.float(), ripe),
        ]
        loss = criterion(losses)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 25 == 0:
        print(step, [round(v.item(), 3) for v in losses], criterion.log_var.tolist())
