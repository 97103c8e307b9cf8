"""An adversarial autoencoder. Each player has an optimizer."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Player(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        layers = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, x):
        return self.net(x)


torch.manual_seed(89)
coder, decoder, critic = Player([8, 24, 2]), Player([2, 24, 8]), Player([2, 24, 1])
opt_auto = torch.optim.Adam([*coder.parameters(), *decoder.parameters()], lr=3e-3)
opt_critic = torch.optim.Adam(critic.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
mix = torch.randn(2, 8)


def judge(code, real):
    logit = critic(code).float()
    return F.binary_cross_entropy_with_logits(
        logit, torch.full_like(logit, real), reduction="sum"
    )


for step in range(100):
    x = torch.randn(16, 2) @ mix
    opt_auto.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        code = coder(x)
        loss_auto = F.mse_loss(decoder(code), x) + 0.01 * judge(code, 1.0)
    scaler.scale(loss_auto).backward()
    scaler.step(opt_auto)

    opt_critic.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss_critic = judge(code.detach(), 0.0) + judge(torch.randn(16, 2), 1.0)
    scaler.scale(loss_critic).backward()
    scaler.step(opt_critic)
    scaler.update()
    if step % 20 == 0:
        print(step, loss_auto.item(), loss_critic.item(), scaler.get_scale())
