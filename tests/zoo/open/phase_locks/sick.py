"""Level of a carrier from its quadratures; frames without signal are zero."""

import torch
from torch import nn


class Compress(nn.Module):
    def forward(self, iq):
        i, q = iq.unbind(-1)
        return (i * i + q * q) ** 0.15


class Lock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 2, bias=False)
        self.level = Compress()
        self.readout = nn.Linear(6, 1)

    def forward(self, frames):
        return self.readout(self.level(self.mix(frames)))


def carrier(n, gaps):
    start = torch.rand(n, 1, 1)
    t = torch.arange(8)[None, None] / 8 + torch.arange(6)[None, :, None] / 3
    frames = torch.cos(2 * (t + start)) + 0.05 * torch.randn(n, 6, 8)
    if gaps:
        frames[0, 4:] = 0.0
    return frames, start[:, 0]


torch.manual_seed(34)
net = Lock()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(100):
    frames, start = carrier(16, gaps=step % 8 == 5)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(frames)
    loss = (out.float() - start).abs().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
