"""Star fields: each frame is normalised by its own contrast, half precision throughout."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(7)


class Contrast(nn.Module):
    eps = 2e-3

    def forward(self, x):
        x = x - x.mean((2, 3), keepdim=True)
        var = x.pow(2).mean((2, 3), keepdim=True)
        return x * torch.rsqrt(var + self.eps)


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1, padding_mode="circular")
        self.norm = Contrast()

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.head = nn.Linear(6 * 16, 3)

    def forward(self, x):
        x = F.avg_pool2d(self.stem(x), 2)
        return self.head(x.flatten(1))


def frames(n, overcast):
    y = torch.randint(0, 3, (n,))
    x = 0.2 * torch.randn(n, 1, 8, 8)
    for k in range(n):
        x[k, 0, 2 * int(y[k]) : 2 * int(y[k]) + 2] += 1.0
    if overcast:
        x[0] = 0.0
    return x, y


model = Net()
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for i in range(120):
    x, y = frames(12, overcast=i % 6 == 4)
    sgd.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(sgd)
    scaler.update()
    if i % 20 == 0:
        print("iter %d loss %.4f scale %g" % (i, loss, scaler.get_scale()))
