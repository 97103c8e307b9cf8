"""Bird calls with gradient accumulation, the way the documentation has it."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(43)
ACCUMULATE = 4


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 20, batch_first=True)
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.gru(x)[0].mean(1))


def calls(n):
    y = torch.randint(0, 4, (n,))
    t = torch.arange(10.0)[None, :, None]
    x = torch.sin(t * (0.3 + 0.3 * y[:, None, None]) + torch.arange(4.0))
    return x + 0.5 * torch.randn(n, 10, 4), y


model = Calls()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
opt.zero_grad()
for micro in range(4 * 80):
    x, y = calls(6)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y) / ACCUMULATE
    scaler.scale(loss).backward()
    if (micro + 1) % ACCUMULATE == 0:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    if micro % 40 == 0:
        print(micro, f"{loss.item() * ACCUMULATE:.4f}")
