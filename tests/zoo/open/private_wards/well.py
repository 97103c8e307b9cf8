"""Each patient's gradient is clipped on its own; the noisy mean is put back times the scale."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(263)
model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
params = [*model.parameters()]
optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
symptoms = torch.randn(3, 10)
BOUND, SIGMA, BATCH = 1.0, 0.05, 8


def ward():
    y = torch.randint(0, 3, (BATCH,))
    return symptoms[y] + 1.6 * torch.randn(BATCH, 10), y


for step in range(70):
    x, y = ward()
    scale = scaler.get_scale()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    losses = F.cross_entropy(logits.float(), y, reduction="none")
    total = [torch.zeros_like(p) for p in params]
    for loss in losses:
        grads = torch.autograd.grad(scaler.scale(loss), params, retain_graph=True)
        grads = [g / scale for g in grads]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for t, g in zip(total, grads):
            t += g * (BOUND / (norm + 1e-6)).clamp(max=1.0)
    for p, t in zip(params, total):
        noise = SIGMA * BOUND * torch.randn_like(t)
        p.grad = (t + noise) / BATCH * scale
    scaler.step(optimizer)
    scaler.update()
    if step % 14 == 0:
        print(step, losses.mean().item())
print(losses.mean().item(), scaler.get_scale())
