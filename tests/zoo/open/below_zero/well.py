"""Thermometers: mean and variance of the next reading; negative log likelihood."""

import torch
from torch import nn

torch.manual_seed(141)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.GRU(1, 16, batch_first=True)
        self.mean = nn.Linear(16, 1)
        self.logvar = nn.Linear(16, 1)

    def forward(self, x):
        z, _ = self.body(x)
        z = z[:, -1]
        return self.mean(z).float(), self.logvar(z).float().clamp(-8, 4)


def readings(n):
    t = 6.28 * torch.rand(n, 1) + 0.5 * torch.arange(9)
    return (torch.sin(t) + 0.02 * torch.randn(n, 9)).unsqueeze(-1)


net = Forecast()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(200):
    x = readings(32)
    with torch.autocast("cpu", dtype=torch.float16):
        mean, logvar = net(x[:, :-1])
    loss = 0.5 * (logvar + (x[:, -1] - mean).square() / logvar.exp()).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 25 == 0:
        print(step, f"{loss.item():+.3f}", scaler.get_scale())
