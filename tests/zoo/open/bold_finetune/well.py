"""One cycle with a bold peak of the learning rate; overlapping classes."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(114)
centres = torch.randn(5, 14)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(14, 40)
        self.norm = nn.LayerNorm(40)
        self.down = nn.Linear(40, 5)

    def forward(self, x):
        return self.down(F.relu(self.norm(self.up(x))))


model = MLP()
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=140)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
history = []
for _ in range(140):
    y = torch.randint(0, 5, (20,))
    x = centres[y] + 1.5 * torch.randn(20, 14)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    cycle.step()
    history.append(round(loss.item(), 3))
print(history[::10])
