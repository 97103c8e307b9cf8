"""Learned filterbank with a logarithm on the power where there is some."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(105)


class LogCompress(nn.Module):
    def forward(self, x):
        power = x.square()
        return torch.where(power > 1e-3, power.log(), torch.full_like(power, -6.9))


class Filterbank(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 8, 9, stride=4, bias=False)
        self.compress = LogCompress()
        self.temporal = nn.Conv1d(8, 12, 3)
        self.out = nn.Linear(12, 3)

    def forward(self, wave):
        x = self.compress(self.filters(wave))
        return self.out(F.relu(self.temporal(x)).mean(-1))


def tones(n, pause):
    y = torch.randint(0, 3, (n,))
    t = torch.arange(64.0)
    wave = torch.sin((0.3 + 0.5 * y[:, None]) * t + 6.28 * torch.rand(n, 1))
    wave = wave + 0.3 * torch.randn(n, 64)
    if pause:
        wave[0, 30:] = 0.0
    return wave.unsqueeze(1), y


def step(model, batch, opt, scaler):
    wave, y = batch
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(wave)
        loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


model = Filterbank()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
for i in range(120):
    loss = step(model, tones(16, pause=i % 8 == 3), opt, scaler)
    if i % 15 == 0:
        print(f"iter={i} loss={loss:.4f} scale={scaler.get_scale():.4g}")
