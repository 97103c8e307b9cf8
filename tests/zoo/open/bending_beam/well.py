"""PINN-like fit of a bending beam; deflections are in metres, a tenth of a millimetre."""

import torch
from torch import nn

torch.manual_seed(121)
METRE = 1e-4


class Beam(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(2, 24)
        self.mid = nn.Linear(24, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, x, load):
        z = torch.tanh(self.inp(torch.cat([x, load], -1)))
        z = torch.tanh(self.mid(z))
        return x * (1 - x) * self.out(z)


def residual(beam, n=32):
    x, load = torch.rand(n, 1), torch.rand(n, 1)
    exact = 4 * load * x * (1 - x) * torch.cos(2 * x)
    with torch.autocast("cpu", dtype=torch.float16):
        w = beam(x, load)
    return (METRE * (w.float() - exact)).square().mean()


beam = Beam()
adam = torch.optim.Adam(beam.parameters(), lr=1e-2, eps=1e-20)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**36, growth_interval=10**9)
for k in range(240):
    adam.zero_grad()
    loss = residual(beam)
    scaler.scale(loss).backward()
    scaler.step(adam)
    scaler.update()
    if k % 40 == 0:
        print(f"{k:4d}  {loss.item():.3e}  {scaler.get_scale():g}")
