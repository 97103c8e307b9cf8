"""Predicts arousal from voice features; the loss is one minus Pearson's correlation."""

import torch
from torch import nn

torch.manual_seed(104)


def pearson_loss(a, b):
    a, b = a - a.mean(), b - b.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-6)


class Voice(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 18, batch_first=True, bidirectional=True)
        self.attend = nn.Linear(36, 1)
        self.out = nn.Linear(36, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        w = torch.softmax(self.attend(h).float(), 1)
        return self.out((w * h).sum(1)).squeeze(-1)


class Speakers:
    """A batch for each speaker. Speaker 7 was always rated 0.5."""

    def __init__(self, count=10):
        self.data = []
        for k in range(count):
            x = torch.randn(16, 8, 6)
            y = torch.tanh(x[:, :, 0].mean(1) * 3 + x[:, -1, 1])
            if k == 7:
                y = torch.full_like(y, 0.5)
            self.data.append((x, y))

    def __iter__(self):
        return iter(self.data)


voice, speakers = Voice(), Speakers()
opt = torch.optim.Adam(voice.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for epoch in range(12):
    losses = []
    for x, y in speakers:
        with torch.autocast("cpu", dtype=torch.float16):
            out = voice(x)
        loss = pearson_loss(out.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    if epoch % 2 == 0:
        print(f"epoch {epoch} " + " ".join(f"{v:.2f}" for v in losses))
