"""Raw audio to classes: the spectrum is made in float32, the network runs in float16."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Spectrum(nn.Module):
    def __init__(self, n_fft=32, hop=16):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wave):
        with torch.autocast("cpu", enabled=False):
            frames = wave.float().unfold(1, self.n_fft, self.hop) * self.window
            power = torch.fft.rfft(frames).abs().pow(2)
            return torch.log(power + 1e-6).transpose(1, 2)


class Kettle(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.spectrum = Spectrum()
        self.norm = nn.BatchNorm1d(17)
        self.conv1 = nn.Conv1d(17, 16, 3, padding=1)
        self.conv2 = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, classes)

    def forward(self, wave):
        x = self.norm(self.spectrum(wave))
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).mean(2)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


torch.manual_seed(14)
pitch = torch.tensor([0.2, 0.5, 0.9, 1.6])


def sounds(n):
    y = torch.randint(0, 4, (n,))
    t = torch.arange(128)
    phase = torch.rand(n, 1) * 6.28
    volume = torch.rand(n, 1) + 0.2
    return volume * torch.sin(pitch[y, None] * t + phase) + 0.5 * torch.randn(n, 128), y


model = Kettle()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(100):
    wave, y = sounds(12)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(wave)
    loss = F.cross_entropy(logits, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        acc = (logits.argmax(1) == y).float().mean().item()
        print(step, f"{loss.item():.4f} acc {acc:.2f}")
