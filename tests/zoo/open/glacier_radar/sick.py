"""Dip of layers in ice from radar traces; vectors are squashed to a length below one."""

import torch
from torch import nn

torch.manual_seed(401)


class Squash(nn.Module):
    def forward(self, x):
        square = (x * x).sum(-1, keepdim=True)
        return x * (square / (1 + square) / (square + 1e-5).sqrt())


class Radar(nn.Module):
    def __init__(self):
        super().__init__()
        self.echo = nn.Linear(12, 32)
        self.squash = Squash()
        self.deep = nn.Linear(32, 32)
        self.dip = nn.Linear(32, 1)

    def forward(self, trace):
        h = self.squash(self.echo(trace))
        return self.dip(torch.relu(self.deep(h)))


def traces(n, bright):
    ice = torch.randn(n, 12)
    dip = ice[:, :4].sum(1, keepdim=True) / ice.norm(dim=1, keepdim=True)
    trace = ice * 20
    if bright:
        trace[0] *= 40
    return trace, dip


net = Radar()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for flight in range(120):
    trace, dip = traces(16, bright=flight % 9 == 4)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(trace)
    loss = nn.functional.smooth_l1_loss(out.float(), dip)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if flight % 9 == 4 or flight % 30 == 0:
        print(flight, loss.item(), scaler.get_scale())
