"""Word stress; the scale starts high and falls in small steps."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(471)
net = nn.Sequential(nn.Linear(11, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, backoff_factor=0.9)
rule = torch.randn(11, 4)
moved = 0
for step in range(180):
    x = torch.randn(24, 11)
    y = (x @ rule).argmax(1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    moved += scaler.get_scale() >= before
    if step % 30 == 0:
        print(step, loss.item(), scaler.get_scale())
print(loss.item(), moved)
