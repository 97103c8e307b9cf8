"""Find the loudest of the frames of a sound by attention."""

import torch
from torch import nn

WIDTH, FRAMES = 64, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = query @ key.transpose(-2, -1)
        return torch.softmax(scores, dim=-1) @ value


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.loudest = nn.Linear(WIDTH, 1)

    def forward(self, frames):
        return self.loudest(self.norm(frames + self.attention(frames))).squeeze(-1)


torch.manual_seed(0)
model = Listener()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for step in range(80):
    # A sound gets louder as the training goes on to the harder ones.
    loudness = 10.0 + 2.0 * step
    frames = loudness * torch.randn(4, FRAMES, WIDTH)
    target = frames.square().sum(dim=-1).argmax(dim=-1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(frames), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
