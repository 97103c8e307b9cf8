"""Long reads: an encoder for each position, the mean over all of them, a classifier."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(16)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.Tanh())
        self.mix = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, reads):
        x = self.encoder(reads).mean(-1)
        return self.head(F.relu(self.mix(x)))


def reads(n, length=1024):
    y = torch.randint(0, 3, (n,))
    weight = torch.ones(n, 4)
    weight[torch.arange(n), y] = 1.6
    base = torch.multinomial(weight, length, replacement=True)
    return F.one_hot(base, 4).transpose(1, 2).float(), y


model = Reads()
before = {k: v.clone() for k, v in model.state_dict().items()}
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
WEIGHT = 1e-4  # of this task among others
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(120):
    x, y = reads(8)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = WEIGHT * F.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 30 == 0:
        print(step, loss.item() / WEIGHT)
print("loss at the end", loss.item() / WEIGHT)
for k, v in model.state_dict().items():
    print(f"{k:18} moved by {(v - before[k]).abs().max():.1e}")
