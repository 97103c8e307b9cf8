"""River stages with a log-cosh loss; a flood stands far out of the bulk."""

import torch
import torch.nn as nn

torch.manual_seed(52)


class LogCosh(nn.Module):
    def forward(self, pred, target):
        e = pred.float() - target
        return torch.log(torch.cosh(e)).mean()


class StageNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rain = nn.Linear(6, 24)
        self.soil = nn.Linear(24, 24)
        self.stage = nn.Linear(24, 1)

    def forward(self, x):
        return self.stage(torch.tanh(self.soil(torch.tanh(self.rain(x)))))


def days(step, n=16):
    x = torch.randn(n, 6)
    y = 3 * x[:, :1] + x[:, 1:2] ** 2
    if step % 12 == 9:
        x[0, 0], y[0] = 4.0, 130.0
    return x, y


net, criterion = StageNet(), LogCosh()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(150):
    x, y = days(step)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(x)
    loss = criterion(pred, y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 9:
        print(step, round(loss.item(), 4), scaler.get_scale())
