"""Cells under two microscopes: BatchNorm statistics are adapted (AdaBN), then the head is tuned."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(9, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.lift(x))))


def cells(n, gain):
    y = torch.randint(0, 2, (n,))
    x = torch.randn(n, 9)
    x[:, :3] += 2.0 * y[:, None] - 1
    return gain * x + gain - 1, y


@torch.no_grad()
def adapt(net, images, batch_size=16):
    means, variances = [], []
    for part in images.split(batch_size):
        z = net.lift(part)
        means.append(z.mean(0))
        variances.append(z.var(0, unbiased=False))
    net.norm.running_mean.copy_(torch.stack(means).mean(0))
    net.norm.running_var.copy_(torch.stack(variances).mean(0))


def train(net, params, gain, steps, scaler):
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = cells(24, gain)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 14 == 0:
            print(f"gain {gain} step {step} loss {loss.item():.4f}")


torch.manual_seed(111)
net = Cells()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
train(net, net.parameters(), 1.0, 70, scaler)
adapt(net, cells(65, 1.6)[0])
net.eval()
train(net, net.head.parameters(), 1.6, 70, scaler)
