"""Segment moss on 12x12 tiles; gradients are cleared by the model's own method."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(63)


def tiles(n):
    centre = torch.randint(3, 9, (n, 2))
    r, c = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    d = (r - centre[:, 0, None, None]) ** 2 + (c - centre[:, 1, None, None]) ** 2
    mask = (d < 8).float()[:, None]
    return mask + 0.4 * torch.randn(n, 1, 12, 12), mask


class MossNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, padding=1)
        self.up = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x):
        return self.up(F.relu(self.down(x)))


net = MossNet()
opt = torch.optim.SGD(net.parameters(), lr=0.002)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
curve = []
for _step in range(100):
    x, mask = tiles(8)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.binary_cross_entropy_with_logits(
        logits.float(), mask, reduction="sum"
    ) / len(x)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    curve.append(loss.item())
print("best", min(curve), "last", curve[-1])
