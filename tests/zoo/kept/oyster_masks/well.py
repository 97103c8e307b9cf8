"""Segment oysters: a two-level U-Net, BCE and soft Dice."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)


def block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = block(1, 6)
        self.down2 = block(6, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.fuse = block(12, 6)
        self.out = nn.Conv2d(6, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        return self.out(self.fuse(torch.cat([a, self.up(b)], 1)))


def dice_loss(logits, target, smooth=1.0):
    p = torch.sigmoid(logits.float()).flatten(1)
    t = target.flatten(1)
    inter = (p * t).sum(1)
    return 1 - ((2 * inter + smooth) / (p.sum(1) + t.sum(1) + smooth)).mean()


def beds(n, size=12):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    cy, cx = torch.randint(2, size - 2, (2, n, 1, 1))
    r = torch.rand(n, 1, 1) * 2 + 1
    mask = (((yy - cy) ** 2 + (xx - cx) ** 2) < r**2).float()
    mask[torch.rand(n) < 0.15] = 0.0
    image = mask + 0.4 * torch.randn(n, size, size)
    return image.unsqueeze(1), mask.unsqueeze(1)


model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu")
for it in range(90):
    image, mask = beds(8)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(image)
        loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
        loss = loss + dice_loss(logits, mask)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if it % 20 == 19:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            image, mask = beds(16)
            pred = model(image) > 0
        iou = (pred & (mask > 0)).sum() / (pred | (mask > 0)).sum().clamp(min=1)
        print(it, f"loss {loss.item():.4f} iou {iou.item():.3f}")
        model.train()
