"""Progressive resizing: rounds of training at 4, 8 and 16 pixels."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.c1(x))
        return self.fc(F.relu(self.c2(x)).mean((2, 3)))


def stripes(n, size):
    y = torch.randint(0, 2, (n,))
    wave = torch.sin(torch.arange(float(size)) * 2.2)
    x = 0.4 * torch.randn(n, 1, size, size)
    x[y == 0] += wave[None, None, :, None]
    x[y == 1] += wave
    y = torch.where(torch.rand(n) < 0.2, 1 - y, y)
    return x, y


scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)


def fit(net, opt, size, steps=14):
    for _ in range(steps):
        x, y = stripes(12, size)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print(f"{size:2d} px  loss {loss.item():.4f}  scale {scaler.get_scale():g}")


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for size in (4, 8, 16):
    for _ in range(5):
        fit(net, opt, size)
