"""Linear probe on a frozen backbone, whose BatchNorm stays in eval mode."""

import torch
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x))).mean((2, 3))


class Probe(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(8, 3)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


torch.manual_seed(106)
model = Probe(Backbone().requires_grad_(False)).train()
opt = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=2.0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(100):
    y = torch.randint(0, 3, (12,))
    x = 0.4 * torch.randn(12, 1, 7, 7)
    for i, k in enumerate(y.tolist()):
        if k == 1:
            x[i, :, ::2] += 1.0
        if k == 2:
            x[i, :, :, ::2] += 1.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item())
