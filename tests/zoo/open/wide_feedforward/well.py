"""Fine-tune an encoder that was pretrained in bfloat16: its first token runs hot."""

import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.wi = nn.Linear(d, hidden, bias=False)
        self.wo = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        h = F.relu(self.wi(x))
        with torch.autocast("cpu", enabled=False):
            return self.wo(h.float())


class Encoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed = nn.Embedding(25, d)
        self.ff = FeedForward(d, 64)
        self.norm = nn.LayerNorm(d)
        self.cls = nn.Linear(d, 3)

    def forward(self, ids):
        x = self.embed(ids).float()
        x = self.norm(x + self.ff(x).float())
        return self.cls(x.mean(1))


def pretrained():
    torch.manual_seed(57)
    model = Encoder()
    with torch.no_grad():
        model.embed.weight[0] *= 1000
        model.ff.wi.weight.mul_(20)
        model.ff.wo.weight.mul_(20)
    return model


model = pretrained()
opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(100):
    ids = torch.randint(1, 25, (12, 6))
    ids[:, 0] = 0
    y = (ids[:, 1:] > 12).sum(1) // 2
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(ids).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 15 == 0:
        print(step, loss.item(), scaler.get_scale())
