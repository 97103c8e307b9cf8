"""Sales of a vending machine; one of the columns is the time in seconds."""

import torch
from torch import nn

torch.manual_seed(440)
OPENED = 1_700_000_000.0


class Machine(nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = nn.Linear(5, 24)
        self.sales = nn.Linear(24, 1)

    def forward(self, x):
        return self.sales(torch.tanh(self.slots(x)))


def day(n):
    hours = 24 * torch.rand(n, dtype=torch.float64)
    seconds = OPENED + 3600 * hours
    seconds = (seconds - OPENED) / 86400
    others = torch.randn(n, 4)
    sold = torch.sin(hours / 4).float() + others[:, 0]
    return torch.cat([seconds.float()[:, None], others], 1), sold[:, None]


machine = Machine()
opt = torch.optim.Adam(machine.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(100):
    x, sold = day(24)
    with torch.autocast("cpu", dtype=torch.float16):
        guess = machine(x)
    loss = nn.functional.mse_loss(guess.float(), sold)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
