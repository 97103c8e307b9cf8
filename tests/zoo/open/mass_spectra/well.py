"""Classify mass spectra by their raw intensities."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Spectra(nn.Module):
    def __init__(self, bins=32, kinds=4):
        super().__init__()
        self.encode = nn.Linear(bins, 24)
        self.norm = nn.LayerNorm(24)
        self.decide = nn.Linear(24, kinds)

    def forward(self, intensity):
        return self.decide(F.gelu(self.norm(self.encode(intensity))))


def spectra(n):
    kind = torch.randint(0, 4, (n,))
    peaks = 50 * torch.rand(n, 32)
    for i, k in enumerate(kind.tolist()):
        peaks[i, 4 + 7 * k : 7 + 7 * k] += 2e5 * (0.5 + torch.rand(3))
    return peaks, kind


torch.manual_seed(73)
model = Spectra()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(90):
    x, y = spectra(16)
    x = torch.log1p(x)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 0:
        print(step, loss.item(), scaler.get_scale())
