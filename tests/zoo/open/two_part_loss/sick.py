"""A depth model with a photometric and a smoothness part; logs the norm of the first."""

import torch
import torch.nn as nn

torch.manual_seed(18)


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Conv2d(2, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.dec = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.enc(x))
        return self.dec(torch.relu(self.mid(x)))


def norm_of(model):
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


model = Depth()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for it in range(100):
    scene = torch.randn(4, 2, 8, 8)
    target = scene[:, :1] * 0.8 - 0.3 * scene[:, 1:]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        depth = model(scene)
    depth = depth.float()
    photometric = (depth - target).abs().mean()
    smooth = 0.02 * depth.diff(dim=-1).abs().mean()
    scaler.scale(photometric).backward(retain_graph=True)
    scaler.unscale_(optimizer)
    norm = norm_of(model)
    scaler.scale(smooth).backward()
    scaler.step(optimizer)
    scaler.update()
    if it % 20 == 0:
        print(f"{it} photometric {photometric.item():.4f} norm {norm:.3f}")
