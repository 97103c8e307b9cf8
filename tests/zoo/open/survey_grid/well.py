"""Interpolate gravity readings at points given in metres of the national grid."""

import torch
from torch import nn

torch.manual_seed(58)
ORIGIN = torch.tensor([430_000.0, 5_310_000.0])


def stations(n):
    local = torch.rand(n, 2)
    reading = torch.sin(3 * local[:, :1]) + local[:, 1:] ** 2
    return ORIGIN + 2000 * local, reading


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(2, 32)
        self.hid = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, p):
        return self.out(torch.tanh(self.hid(torch.tanh(self.inp(p)))))


def closure(net, scaler, opt, p, y):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(p)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    return loss.item()


net = Field()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
values = []
for _ in range(100):
    p, y = stations(24)
    p = (p - ORIGIN) / 2000
    values.append(closure(net, scaler, opt, p, y))
    scaler.step(opt)
    scaler.update()
print("start", values[0], "end", values[-1], "scale", scaler.get_scale())
