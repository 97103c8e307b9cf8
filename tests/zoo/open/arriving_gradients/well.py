"""Neural CA on small grids. Gradient norms are collected as the gradients arrive."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(124)


class Automaton(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.perceive = nn.Conv2d(channels, 16, 3, padding=1)
        self.update = nn.Conv2d(16, channels, 1)
        self.channels = channels

    def forward(self, seed, rounds=4):
        x = torch.cat(
            [seed, seed.new_zeros(len(seed), self.channels - 1, *seed.shape[2:])], 1
        )
        for _ in range(rounds):
            x = x + self.update(F.relu(self.perceive(x))).float()
        return x[:, :1]


net = Automaton()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
norms = defaultdict(list)
names = {p: name for name, p in net.named_parameters()}


def collect(p):
    grad = p.grad / scaler.get_scale()
    norms[names[p]].append(grad.norm().item())


for p in net.parameters():
    p.register_post_accumulate_grad_hook(collect)

for it in range(80):
    seed = (torch.rand(6, 1, 7, 7) < 0.2).float()
    goal = F.max_pool2d(seed, 3, 1, 1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        grown = net(seed)
    loss = F.mse_loss(grown.float(), goal)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 0:
        print(it, f"{loss.item():.4f}", {k: round(v[-1], 4) for k, v in norms.items()})
