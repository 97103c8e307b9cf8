"""Whale calls: every clip is brought to unit variance by its Dataset."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __init__(self, n=192, length=48):
        g = torch.Generator().manual_seed(7)
        t = torch.arange(length) / 6.0
        self.call = torch.randint(0, 3, (n,), generator=g)
        pitch = 0.6 + 0.7 * self.call[:, None]
        self.wave = torch.sin(pitch * t) + 0.4 * torch.randn(n, length, generator=g)
        # Clips of the broken hydrophone are silent.
        self.wave[[70, 71, 150]] = 0.0

    def __len__(self):
        return len(self.wave)

    def __getitem__(self, i):
        clip = self.wave[i]
        clip = (clip - clip.mean()) / clip.std()
        return clip[None], self.call[i]


class CallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(1, 8, 9, stride=3)
        self.back = nn.Conv1d(8, 12, 3, stride=2)
        self.kind = nn.Linear(12, 3)

    def forward(self, x):
        x = torch.relu(self.back(torch.relu(self.front(x))))
        return self.kind(x.mean(-1))


torch.manual_seed(71)
net = CallNet()
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
loader = DataLoader(Clips(), batch_size=12, shuffle=False)
for epoch in range(7):
    for clip, call in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(clip), call)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print(epoch, loss.item(), scaler.get_scale())
