"""Stroke-order classifier; three micro-batches make one batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
WINDOW = 3


class StrokeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 16)
        self.conv = nn.Conv1d(16, 24, 3, padding=1)
        self.out = nn.Linear(24, 5)

    def forward(self, strokes):
        z = F.relu(self.embed(strokes)).transpose(1, 2)
        z = F.relu(self.conv(z)).mean(-1)
        return self.out(z)


def sample(n):
    label = torch.randint(0, 5, (n,))
    angle = label[:, None] * 0.7 + torch.linspace(0, 1, 9)[None]
    xy = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
    return xy + 0.15 * torch.randn_like(xy), label


net = StrokeNet()
opt = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=500)
history = []
for _step in range(90):
    opt.zero_grad(set_to_none=True)
    for _part in range(WINDOW):
        x, y = sample(8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x).float(), y) / WINDOW
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(opt)
    scaler.update()
    history.append(loss.item() * WINDOW)
print("start", sum(history[:10]) / 10, "end", sum(history[-10:]) / 10)
