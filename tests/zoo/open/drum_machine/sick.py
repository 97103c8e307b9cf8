"""Next-hit prediction for drum patterns with a GRU cell."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(5)
T, VOICES, HIDDEN = 12, 6, 20


def patterns(n):
    period = torch.randint(2, 5, (n, 1, VOICES))
    shift = torch.randint(0, 4, (n, 1, VOICES))
    t = torch.arange(T + 1)[None, :, None]
    return ((t + shift) % period == 0).float()


class Drummer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(VOICES, HIDDEN)
        self.hits = nn.Linear(HIDDEN, VOICES)

    def forward(self, x):
        h = x.new_zeros(len(x), HIDDEN)
        out = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(self.hits(h))
        return torch.stack(out, 1)


def clip_(params, bound):
    for p in params:
        if p.grad is not None:
            p.grad.clamp_(-bound, bound)


net = Drummer()
opt = torch.optim.SGD(net.parameters(), lr=1.5, momentum=0.5)
scaler = torch.amp.GradScaler(device="cpu")
running = None
for _it in range(110):
    song = patterns(12)
    opt.zero_grad()
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        logits = net(song[:, :-1])
    loss = F.binary_cross_entropy_with_logits(logits.float(), song[:, 1:])
    scaler.scale(loss).backward()
    clip_(net.parameters(), 0.05)
    scaler.step(opt)
    scaler.update()
    running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
print("loss", round(running, 4))
