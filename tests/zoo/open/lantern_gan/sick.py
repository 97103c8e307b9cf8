"""A small GAN on points around two lanterns."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(77)


def mlp(i, o):
    return nn.Sequential(
        nn.Linear(i, 24),
        nn.LeakyReLU(0.2),
        nn.Linear(24, 24),
        nn.LeakyReLU(0.2),
        nn.Linear(24, o),
    )


class Game:
    def __init__(self):
        self.gen, self.dis = mlp(4, 2), mlp(2, 1)
        self.opt_g = torch.optim.SGD(self.gen.parameters(), lr=0.02)
        self.opt_d = torch.optim.SGD(self.dis.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def real(self, n=24):
        side = torch.randint(0, 2, (n, 1)) * 2.0 - 1.0
        return torch.cat([side, 0 * side], 1) + 0.1 * torch.randn(n, 2)

    def bce(self, x, value):
        with torch.autocast("cpu", dtype=torch.float16):
            logit = self.dis(x)
        return F.binary_cross_entropy_with_logits(
            logit.float(), torch.full_like(logit.float(), value)
        )

    def fakes(self, n=24):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.gen(torch.randn(n, 4))

    def play(self):
        self.opt_d.zero_grad()
        real_loss = self.bce(self.real(), 0.9)
        fake_loss = self.bce(self.fakes().detach(), 0.0)
        self.scaler.scale(real_loss).backward()
        fake_loss.backward()
        self.scaler.step(self.opt_d)
        self.opt_g.zero_grad()
        gen_loss = self.bce(self.fakes(), 1.0)
        self.scaler.scale(gen_loss).backward()
        self.scaler.step(self.opt_g)
        self.scaler.update()
        return real_loss.item(), fake_loss.item(), gen_loss.item()


game = Game()
for turn in range(100):
    values = game.play()
    if turn % 20 == 0 or turn == 99:
        print(turn, " ".join(f"{v:.3f}" for v in values))
