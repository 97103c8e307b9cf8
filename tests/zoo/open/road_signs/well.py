# Classify road signs (feature vectors of 10 kinds) with a soft target distribution.
import json
import math

import torch
from torch import nn

torch.manual_seed(64)
centres = 3 * torch.randn(10, 12)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

losses = []
n_skipped = 0
for it in range(140):
    kind = torch.randint(0, 10, (24,))
    x = centres[kind] + torch.randn(24, 12)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
        logp = torch.log_softmax(logits, dim=1)
        loss = -logp[torch.arange(24), kind].mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    old_scale = scaler.get_scale()
    scaler.update()
    n_skipped += scaler.get_scale() < old_scale
    losses.append(loss.item())
    if it % 35 == 0:
        print(it, loss.item())

late = sum(losses[-20:]) / 20
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": late if math.isfinite(late) else "nan",
            "scale": scaler.get_scale(),
            "taken": len(losses) - n_skipped,
            "skipped": n_skipped,
        }
    )
)
