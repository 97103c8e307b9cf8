"""Take the noise out of small pictures."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for step in range(60):
    # From here on in larger batches, as the machine has room for them.
    size = 32 if step < 30 else 128
    pictures = 4.0 * torch.rand(size, 1, 1) * torch.randn(size, 16, 1) * torch.randn(16)
    pictures = pictures.flatten(1)
    noisy = pictures + 0.1 * torch.randn(size, 256)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        errors = (model(noisy) - pictures.half()).square()
        loss = errors.mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
