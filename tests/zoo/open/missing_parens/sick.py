"""Fashion sketches: a plain convolutional classifier."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)


class Sketch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 10, 3, padding=1)
        self.c = nn.Linear(10 * 4, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.c(x.flatten(1))


def draw(n):
    y = torch.randint(0, 4, (n,))
    x = 0.5 * torch.randn(n, 1, 8, 8)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 4 * (k // 2) : 4 * (k // 2) + 4, 4 * (k % 2) : 4 * (k % 2) + 4] += 1
    return x, y


net = Sketch()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
for i in range(100):
    x, y = draw(16)
    opt.zero_grad
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = F.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if (i + 1) % 20 == 0:
        print("batch", i + 1, "loss", loss.item(), "scale", scaler.get_scale())
