"""One-stage detector on a 6x6 grid: focal objectness, boxes of the positives only."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Detector(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.obj = nn.Conv2d(width, 1, 1)
        self.box = nn.Conv2d(width, 2, 1)
        # Prior of 0.01, as in RetinaNet.
        nn.init.constant_(self.obj.bias, -4.6)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.body(x))
        return self.obj(x).squeeze(1), self.box(x)


def focal(logits, target, alpha=0.25, gamma=2.0):
    logits = logits.float()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = torch.sigmoid(logits)
    pt = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - pt) ** gamma * ce).sum()


def scenes(n):
    x = 0.2 * torch.randn(n, 1, 12, 12)
    obj = torch.zeros(n, 6, 6)
    box = torch.zeros(n, 2, 6, 6)
    for i in range(n):
        for _ in range(torch.randint(0, 3, (1,)).item()):
            r, c = torch.randint(0, 6, (2,)).tolist()
            size = torch.rand(2) + 0.5
            x[i, 0, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] += 2 * size.mean()
            obj[i, r, c] = 1
            box[i, :, r, c] = size
    return x, obj, box


torch.manual_seed(21)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
scaler = torch.amp.GradScaler("cpu")
for step in range(110):
    x, obj, box = scenes(8)
    optimizer.zero_grad()
    with torch.amp.autocast("cpu", dtype=torch.float16):
        pred_obj, pred_box = model(x)
        num_pos = max(obj.sum().item(), 1.0)
        cls_loss = focal(pred_obj, obj) / num_pos
        pos = obj.bool().unsqueeze(1).expand_as(box)
        box_loss = F.smooth_l1_loss(pred_box.float()[pos], box[pos], reduction="sum")
        loss = cls_loss + box_loss / num_pos
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    warmup.step()
    if step % 20 == 0:
        print(f"{step} cls {cls_loss.item():.3f} box {box_loss.item():.3f}")
