"""Two phases: train all, then train the head with the backbone in eval mode."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


def fetch(i, n=16):
    y = torch.randint(0, 3, (n,))
    x = torch.randn(n, 1, 6, 6)
    x = x + torch.stack(
        [torch.sin(torch.arange(36.0) * (k + 1) / 2).view(1, 6, 6) for k in y.tolist()]
    )
    if i == 33:
        x[5, 0, 2, 2] = float("nan")
    return x, y


def run(net, params, steps, scaler, offset):
    opt = torch.optim.Adam(params, lr=1e-2)
    for i in range(offset, offset + steps):
        x, y = fetch(i)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x).float(), y)
        if not torch.isfinite(loss) and net.training:
            print("skipping batch", i)
            continue
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if i % 15 == 0:
            print(i, loss.item())


net = Net()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
run(net, net.parameters(), 61, scaler, 0)
net.eval()
for p in net.backbone.parameters():
    p.requires_grad_(False)
run(net, net.head.parameters(), 60, scaler, 61)
