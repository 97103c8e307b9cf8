"""A GRU copies sequences; the curriculum lengthens them from 3 to 8."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
VOCAB, START = 8, 0


class Scribe(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.reader = nn.GRU(d, d, batch_first=True)
        self.writer = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, src):
        _, h = self.reader(self.embed(src))
        inp = torch.cat([torch.full_like(src[:, :1], START), src[:, :-1]], 1)
        y, _ = self.writer(self.embed(inp), h)
        return self.out(y)


model = Scribe()
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
scaler = torch.amp.GradScaler("cpu")
length, recent = 3, []
for step in range(160):
    src = torch.randint(1, VOCAB, (16, length))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(src)
        loss = F.cross_entropy(logits.flatten(0, 1), src.flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    recent.append((logits.argmax(-1) == src).float().mean().item())
    if len(recent) >= 10 and sum(recent[-10:]) / 10 > 0.6 and length < 8:
        length += 1
        recent.clear()
        print(f"step {step}: length {length}")
    if step % 40 == 0:
        print(step, f"{loss.item():.3f}")
