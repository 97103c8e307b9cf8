"""Roll out a learned chaotic system; the horizon grows during training."""

import torch
from torch import nn

torch.manual_seed(59)


class Dynamics(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.step = nn.Linear(d, d)
        nn.init.normal_(self.step.weight, std=4.5 / d**0.5)

    def forward(self, state, horizon):
        states = []
        for _t in range(horizon):
            state = torch.sin(self.step(state))
            states.append(state)
        return torch.stack(states)


model = Dynamics()
opt = torch.optim.SGD(model.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for it in range(170):
    horizon = 2 + it // 8
    start = torch.randn(8, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        path = model(start, horizon)
    loss = path.float().mean(-1).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 20 == 0:
        print(it, horizon, loss.item(), norm.item(), scaler.get_scale())
