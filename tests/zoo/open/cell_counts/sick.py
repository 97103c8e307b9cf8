"""Count cells in 10x10 patches; the scale is raised eagerly."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3)


def patches(n):
    k = torch.randint(1, 6, (n,))
    img = torch.zeros(n, 1, 10, 10)
    for i in range(n):
        for _ in range(int(k[i])):
            r, c = torch.randint(1, 9, (2,)).tolist()
            img[i, 0, r - 1 : r + 2, c - 1 : c + 2] += 0.5
    return img + 0.05 * torch.randn_like(img), k[:, None].float()


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.density = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.density(F.softplus(self.conv(x))).sum((2, 3))


net = Counter()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", growth_factor=2.0, growth_interval=1)
for step in range(110):
    x, k = patches(12)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        count = net(x)
    loss = F.l1_loss(count.float(), k)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
