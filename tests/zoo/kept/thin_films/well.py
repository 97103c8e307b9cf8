"""Fit the reflectance of thin films: the targets are of the order of 1e-4."""

import torch
import torch.nn as nn

torch.manual_seed(79)


class Film(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(5, 24)
        self.optics = nn.Linear(24, 24)
        self.spectrum = nn.Linear(24, 64)
        nn.init.zeros_(self.spectrum.bias)
        nn.init.normal_(self.spectrum.weight, std=1e-4)

    def forward(self, x):
        return self.spectrum(torch.tanh(self.optics(torch.tanh(self.layers(x)))))


curve = 1e-4 * torch.randn(5, 64)
d_nm = 1e-3
model = Film()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-20)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=100)
for step in range(180):
    x = torch.randn(32, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = d_nm * (pred.float() - torch.tanh(x) @ curve).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 30 == 0:
        print(step, loss.item(), scaler.get_scale())
