"""Counts people in square tiles of a camera image (8-bit, not normalised)."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)


class SumPool(nn.Module):
    """Counts add up over the image, so sum rather than average."""

    def forward(self, maps):
        return maps.float().sum(dim=(2, 3))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.ReLU()
        )
        self.pool = SumPool()
        self.head = nn.Linear(6, 1)

    def forward(self, image):
        return self.head(self.pool(self.features(image)) / 40000)


def tiles(n):
    people = torch.randint(0, 5, (n,))
    image = 30 + 8 * torch.randn(n, 1, 64, 64)
    for k, many in enumerate(people):
        for _ in range(many):
            r, c = torch.randint(0, 44, (2,)).tolist()
            image[k, 0, r : r + 20, c : c + 20] = 250.0
    return image.clamp(0, 255), people.float()[:, None]


net = Counter()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for it in range(60):
    images, count = tiles(4)
    with torch.autocast("cpu", torch.float16):
        guess = net(images)
        loss = F.smooth_l1_loss(guess.float(), count)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 9:
        print(f"[{it + 1:3d}/60] loss={loss.item():.3f} scale={scaler.get_scale():g}")
