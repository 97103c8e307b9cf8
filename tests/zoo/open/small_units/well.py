"""A physics-informed network for an oscillation, with displacements in metres."""

import torch
import torch.nn as nn

torch.manual_seed(13)
torch.set_num_threads(1)


class PINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(
            nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, t):
        return self.f(t) * 1e-4


net = PINN()
opt = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-16)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for it in range(150):
    t = torch.rand(32, 1, requires_grad=True) * 3
    with torch.autocast("cpu", dtype=torch.float16):
        u = net(t)
    (du,) = torch.autograd.grad(u.float().sum(), t, create_graph=True)
    res = ((du + u.float()) ** 2).mean()
    with torch.autocast("cpu", dtype=torch.float16):
        u0 = net(torch.zeros(1, 1))
    bc = ((u0.float() - 1e-4) ** 2).mean()
    loss = res + bc
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 25 == 0 or it == 149:
        print(it, f"{loss.item():.3e}", scaler.get_scale())
