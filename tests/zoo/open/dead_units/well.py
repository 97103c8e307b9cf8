"""Ocean buoys: units that never fire are drawn anew every 50 steps."""

import torch
from torch import nn

torch.manual_seed(12)


class Buoy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 20)
        self.fc2 = nn.Linear(20, 1)
        with torch.no_grad():
            self.fc1.bias[7] = -30.0

    def forward(self, x):
        self.fired = torch.relu(self.fc1(x))
        return self.fc2(self.fired)


@torch.no_grad()
def revive(net):
    dead = (net.fired > 0).sum(0) == 0
    if dead.any():
        w = net.fc1.weight
        spread = w[~dead].std(0)
        w[dead] = torch.randn_like(w[dead]) * spread
        net.fc1.bias[dead] = 0.0
        print("revived", int(dead.sum()), "units")


net = Buoy()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
true = torch.randn(6) / 2
for step in range(1, 161):
    x = torch.randn(40, 6)
    y = torch.sin(x @ true)[:, None]
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(x)
    loss = nn.functional.mse_loss(guess.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 50 == 0:
        revive(net)
    if step % 20 == 0:
        print(step, f"{loss.item():.4f}")
