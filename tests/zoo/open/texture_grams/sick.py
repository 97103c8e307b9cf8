"""Classifies textures by their Gram matrix."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Gram(nn.Module):
    def forward(self, fmap):
        b, c, h, w = fmap.shape
        f = fmap.reshape(b, c, h * w)
        return torch.bmm(f, f.transpose(1, 2)) / (h * w)


class Texture(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.gram = Gram()
        self.norm = nn.LayerNorm(36)
        self.fc = nn.Linear(36, 3)

    def forward(self, x):
        g = self.gram(self.conv(x)).flatten(1)
        return self.fc(self.norm(g.float()))


def textures(n):
    y = torch.randint(0, 3, (n,))
    x = torch.randn(n, 1, 22, 22)
    x[y == 1] = x[y == 1] + x[y == 1].roll(1, -1)
    x[y == 2] = x[y == 2] + x[y == 2].roll(1, -2)
    return 40 * x, y  # grey levels around the mean


torch.manual_seed(101)
model = Texture()
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for i in range(100):
    img, label = textures(12)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(img)
    loss = F.cross_entropy(out.float(), label)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if i % 20 == 0:
        print("[%d] loss: %.3f" % (i, loss.item()))
