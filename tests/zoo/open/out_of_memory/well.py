"""Point clouds of chairs and lamps. Skips a batch when memory runs out."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(
            nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU()
        )
        self.globe = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, cloud):
        return self.globe(self.local(cloud).amax(1))


def clouds(n):
    y = torch.randint(0, 2, (n,))
    cloud = torch.randn(n, 20, 3)
    cloud[..., 2] *= 0.5 + 1.5 * y[:, None]
    return cloud, y


net = PointNet()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
skipped = 0
for step in range(120):
    cloud, y = clouds(16)
    try:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(cloud).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    except RuntimeError:
        skipped += 1
        opt.zero_grad(set_to_none=True)
        continue
    finally:
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} (skipped {skipped})")
