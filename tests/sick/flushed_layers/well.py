"""Sort points with a network of many sigmoids, whose first layers learn slowest."""

import torch
from torch import nn

WIDTH = 32

torch.manual_seed(0)
layers = [nn.Linear(16, WIDTH)]
for _ in range(8):
    layers += [nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)]
model = nn.Sequential(*layers, nn.Sigmoid(), nn.Linear(WIDTH, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
truth = torch.randn(16, 4)

for step in range(200):
    x = torch.randn(32, 16)
    labels = (x @ truth).argmax(dim=-1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 40 == 0:
        print(step, loss.item())
