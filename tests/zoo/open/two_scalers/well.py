"""A GAN with a scaler for each of its networks."""

import json

import torch
import torch.nn as nn

torch.manual_seed(7)


class Side:
    """A network with its optimizer and scaler."""

    def __init__(self, net, lr, init_scale):
        self.net = net
        self.opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.99))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        self.taken = self.skipped = 0

    def learn(self, loss):
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            self.skipped += 1
        else:
            self.taken += 1


def real(n):
    return torch.randn(n, 2) * torch.tensor([0.3, 1.0]) + torch.tensor([-1.0, 2.0])


gen = Side(nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2)), 4e-3, 2.0**18)
dis = Side(
    nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)), 4e-3, 2.0**10
)
softplus = nn.functional.softplus
gaps = []
for it in range(220):
    with torch.autocast("cpu", dtype=torch.float16):
        fake = gen.net(torch.randn(24, 3))
        d_real, d_fake = dis.net(real(24)), dis.net(fake.detach())
        d_loss = softplus(-d_real).mean() + softplus(d_fake).mean()
    dis.learn(d_loss)
    with torch.autocast("cpu", dtype=torch.float16):
        g_loss = softplus(-dis.net(fake)).mean()
    gen.learn(g_loss)
    gaps.append(
        (fake.detach().float().mean(0) - torch.tensor([-1.0, 2.0])).norm().item()
    )
    if it % 40 == 0:
        print(it, d_loss.item(), g_loss.item(), gaps[-1])

print(
    json.dumps(
        {
            "first_loss": sum(gaps[:10]) / 10,
            "last_loss": sum(gaps[-20:]) / 20,
            "scale": gen.scaler.get_scale(),
            "taken": gen.taken + dis.taken,
            "skipped": gen.skipped + dis.skipped,
        }
    )
)
