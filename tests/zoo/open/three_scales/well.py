"""Three independent learners of one ensemble, each with a scaler of its own."""

import torch
from torch import nn

torch.manual_seed(108)


class Member:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(4, 16 + 4 * seed), nn.Tanh(), nn.Linear(16 + 4 * seed, 1)
        )
        self.opt = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + 2 * seed))

    def learn(self, x, y):
        keep = torch.rand(len(x)) < 0.8
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.net(x[keep])
        loss = nn.functional.mse_loss(out.float(), y[keep])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


ensemble = [Member(seed) for seed in range(3)]
for step in range(90):
    x = torch.randn(24, 4)
    y = x[:, :1].sin() + 0.2 * x[:, 1:2]
    losses = [member.learn(x, y) for member in ensemble]
    if step % 15 == 0:
        print(step, *(f"{v:.3f}" for v in losses))
