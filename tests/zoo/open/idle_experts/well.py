"""Four experts, each token goes to one of them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(148)


class Experts(nn.Module):
    def __init__(self, dim=12, count=4):
        super().__init__()
        self.gate = nn.Linear(dim, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, dim))
            for _ in range(count)
        )

    def forward(self, x):
        share = torch.softmax(self.gate(x).float(), -1)
        best, who = share.max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mine = who == k
            if mine.any():
                out[mine] = best[mine, None] * expert(x[mine]).float()
        return x + out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 12)
        self.moe = Experts()
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        return self.out(self.moe(self.inp(x).float()))


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
centre = 1.5 * torch.randn(4, 5)
for step in range(160):
    topic = torch.randint(0, 4, (2,))
    y = topic[torch.randint(0, 2, (12,))]
    x = centre[y] + torch.randn(12, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        busy = sum(e[0].weight.grad is not None for e in net.moe.experts)
        print(step, round(loss.item(), 4), "busy experts", busy)
