"""Echo canceller. The scale follows a schedule of its own."""

import torch
from torch import nn

torch.manual_seed(24)
room = torch.exp(-torch.arange(12) / 3.0) * torch.randn(12)


class Canceller(nn.Module):
    def __init__(self):
        super().__init__()
        self.ear = nn.Linear(12, 32)
        self.mix = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.mix(torch.tanh(self.ear(x)))))


def scheduled(step):
    return 2.0**16


net = Canceller()
opt = torch.optim.SGD(net.parameters(), lr=40.0, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=scheduled(0))
for step in range(160):
    x = torch.randn(24, 12)
    y = (x @ room)[:, None]
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(x)
    loss = 1e-3 * (guess.float() - y).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update(scheduled(step + 1))
    if step % 20 == 0:
        print(step, f"{loss.item() * 1e3:.4f}")
