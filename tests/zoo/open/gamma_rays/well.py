"""Tell showers from noise in camera images; random gamma as augmentation."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(92)


def camera(n):
    y = torch.randint(0, 2, (n,))
    img = 0.5 + 0.12 * torch.randn(n, 1, 8, 8)
    img[y == 1, :, 3:5, 1:7] += 0.25
    return img, y


def augment(img):
    gamma = 0.7 + 0.6 * torch.rand(len(img), 1, 1, 1)
    return img.clamp(min=1e-3).pow(gamma)


def stream(steps, batch=8):
    for step in range(steps):
        img, y = camera(batch)
        if step % 9 == 8:
            # Pedestal subtraction of a dark run.
            img = img - 0.35
        yield augment(img), y


model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step, (img, y) in enumerate(stream(90)):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(img), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(f"{step:3d} {loss.item():.4f}")
