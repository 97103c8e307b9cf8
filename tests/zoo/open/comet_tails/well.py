"""Brightness of comets; one in sixty batches has an outburst and overflows."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(102)


class Comet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 24)
        self.b = nn.Linear(24, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def nights(n, outburst):
    x = torch.randn(n, 5)
    y = x[:, :1] - 0.5 * x[:, 1:2]
    if outburst:
        y[0] += 400.0
    return x, y


model = Comet()
opt = torch.optim.SGD(model.parameters(), lr=0.03)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=50)
for night in range(200):
    x, y = nights(16, outburst=night % 60 == 45)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = F.mse_loss(pred.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(opt)
    scaler.update()
    if night % 25 == 0:
        print(night, loss.item(), scaler.get_scale())
