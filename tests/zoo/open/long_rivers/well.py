"""River levels: truncated backpropagation through time, chunk by chunk."""

import torch
import torch.nn as nn

torch.manual_seed(19)
CHUNKS, LENGTH = 3, 8


class River(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.cell = nn.LSTMCell(2, hidden)
        self.level = nn.Linear(hidden, 1)

    def forward(self, rain, state):
        outs = []
        for t in range(rain.shape[1]):
            state = self.cell(rain[:, t], state)
            outs.append(self.level(state[0]))
        return torch.stack(outs, 1), state


def season(n):
    rain = torch.randn(n, CHUNKS * LENGTH, 2)
    level = [torch.zeros(n)]
    for t in range(rain.shape[1]):
        level.append(0.7 * level[-1] + 0.6 * rain[:, t, 0])
    return rain, torch.stack(level[1:], 1)[..., None]


model = River()
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for year in range(60):
    rain, level = season(8)
    state = (torch.zeros(8, 16), torch.zeros(8, 16))
    opt.zero_grad()
    total = 0.0
    for c in range(CHUNKS):
        part = slice(c * LENGTH, (c + 1) * LENGTH)
        with torch.autocast("cpu", dtype=torch.float16):
            out, state = model(rain[:, part], state)
        loss = (out.float() - level[:, part]).pow(2).mean() / CHUNKS
        total += loss.item()
        scaler.scale(loss).backward()
        state = tuple(s.detach().float() for s in state)
    scaler.step(opt)
    scaler.update()
    if year % 10 == 0:
        print(f"year {year} loss {total:.4f}")
