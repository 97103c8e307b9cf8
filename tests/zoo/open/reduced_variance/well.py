"""SVRG: gradients are corrected by those at a snapshot, which are taken in float32."""

import copy

import torch
from torch import nn

torch.manual_seed(251)
X = torch.randn(96, 8)
Y = torch.tanh(X @ torch.randn(8, 2)) + 0.1 * torch.randn(96, 2)
model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
mse = nn.MSELoss()

for epoch in range(14):
    anchor = copy.deepcopy(model)
    anchor.zero_grad()
    mse(anchor(X), Y).backward()
    mean = [p.grad.clone() for p in anchor.parameters()]
    for rows in torch.randperm(96).split(8):
        anchor.zero_grad()
        mse(anchor(X[rows]), Y[rows]).backward()

        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(X[rows])
        loss = mse(out.float(), Y[rows])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p, q, m in zip(model.parameters(), anchor.parameters(), mean, strict=True):
            p.grad += m - q.grad
        scaler.step(optimizer)
        scaler.update()
    if epoch % 3 == 1:
        with torch.no_grad():
            print(epoch, mse(model(X), Y).item(), scaler.get_scale())
