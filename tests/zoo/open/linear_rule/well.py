"""Plankton images; the learning rate follows the linear scaling rule."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--base-lr", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


class Plankton(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.fc = nn.Linear(12 * 4, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(x.flatten(1))


def sample(n):
    y = torch.randint(0, 3, (n,))
    x = torch.randn(n, 1, 8, 8)
    x[y == 1, :, :, :4] += 1
    x[y == 2, :, :4] += 1
    return x, y


args = parse()
torch.manual_seed(10)
net = Plankton()
lr = args.base_lr * args.batch_size / 256
opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(args.steps):
    x, y = sample(args.batch_size)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = F.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(f"{step:4d} {loss.item():.4f}")
