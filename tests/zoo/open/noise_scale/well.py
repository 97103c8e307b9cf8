"""Estimates the critical batch size: small gradients are measured and thrown away."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(311)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.gru = nn.GRU(12, 12, batch_first=True)
        self.tag = nn.Linear(12, 4)

    def forward(self, x):
        return self.tag(self.gru(self.words(x))[0])


tagger = Tagger()
opt = torch.optim.Adam(tagger.parameters(), lr=8e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
tags_of = torch.randint(0, 4, (30,))


def backward(words):
    tags = (
        tags_of[words]
        + torch.cat([words.new_zeros(len(words), 1), words[:, :-1]], 1) % 2
    ) % 4
    with torch.autocast("cpu", dtype=torch.float16):
        logits = tagger(words)
    loss = F.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
    scaler.scale(loss).backward()
    return loss


def norm():
    squares = [p.grad.square().sum() for p in tagger.parameters()]
    return torch.stack(squares).sum().item() / scaler.get_scale() ** 2


noise = signal = None
for step in range(80):
    words = torch.randint(0, 30, (16, 7))
    small = None
    if step % 4 == 0:
        backward(words[:4])
        small = norm()
        opt.zero_grad()
    loss = backward(words)
    if small is not None:
        big = norm()
        g2, s = (16 * big - 4 * small) / 12, (small - big) / (1 / 4 - 1 / 16)
        signal = g2 if signal is None else 0.9 * signal + 0.1 * g2
        noise = s if noise is None else 0.9 * noise + 0.1 * s
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step % 16 == 0:
        print(step, round(loss.item(), 4), "critical batch", noise / signal)
print(round(loss.item(), 4))
