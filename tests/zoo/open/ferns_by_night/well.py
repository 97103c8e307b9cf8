"""Night photographs of ferns, 6 kinds."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(50)
prototypes = torch.randn(6, 40)


def photos(n):
    y = torch.randint(0, 6, (n,))
    return prototypes[y] + 0.8 * torch.randn(n, 40), y


def train_one(model, opt, scaler, batch):
    x, y = batch
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad(set_to_none=False)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.detach()


model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 6))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = [train_one(model, opt, scaler, photos(24)) for _ in range(100)]
print("first", losses[0].item(), "last", losses[-1].item())
