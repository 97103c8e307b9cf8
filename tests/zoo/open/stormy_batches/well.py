"""Wave heights. Storms are rare, their errors large; gradients are clipped."""

import torch
import torch.nn as nn

torch.manual_seed(150)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 12, 5)
        self.fc1 = nn.Linear(12 * 12, 32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(torch.relu(self.conv(x)).flatten(1))))


def sea(n, storm):
    x = torch.randn(n, 1, 16)
    if storm:
        x = 10 * x
    return x, x.abs().mean((1, 2)).unsqueeze(1) - 0.8


net = Waves()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(1, 201):
    x, y = sea(16, storm=step % 20 == 0)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = (out.float() - y).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 20 in (0, 19):
        print(f"{step:3d} loss {loss.item():9.4f} norm {norm.item():8.3f}")
