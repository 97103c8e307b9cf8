"""Segment bright blobs: a small fully convolutional network and a focal loss."""

import json

import torch
from torch import nn

EPS = 1e-3


def focal_loss(probability, mask, gamma=1.0):
    hit = mask * (1 - probability) ** gamma * torch.log(probability + EPS)
    miss = (1 - mask) * probability**gamma * torch.log(1 - probability + EPS)
    return -(hit + miss).mean()


class Segmenter(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.body = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 1, 1)

    def forward(self, image):
        h = torch.relu(self.stem(image))
        h = torch.relu(self.body(h))
        return self.last(h)


def blobs(n):
    mask = torch.zeros(n, 1, 10, 10)
    for i in range(n):
        r, c = torch.randint(0, 7, (2,)).tolist()
        mask[i, 0, r : r + 3, c : c + 3] = 1
    return mask * 4 + 0.5 * torch.randn_like(mask), mask


torch.manual_seed(2)
net = Segmenter()
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu")
losses = []
taken, skipped = 0, 0

for _step in range(200):
    image, mask = blobs(8)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        probability = torch.sigmoid(net(image))
        loss = focal_loss(probability, mask)
    scaler.scale(loss).backward()
    scaler.step(opt)
    previous = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < previous:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())

last = sum(losses[-5:]) / 5
result = {
    "first_loss": sum(losses[:5]) / 5,
    "last_loss": "nan" if last != last else last,
    "scale": scaler.get_scale(),
    "taken": taken,
    "skipped": skipped,
}
print(json.dumps(result))
