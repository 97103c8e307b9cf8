"""Highway network with a gate bias of -12, as the paper has it for deep ones."""

import torch
import torch.nn as nn

torch.manual_seed(46)


class Highway(nn.Module):
    def __init__(self, dim, bias):
        super().__init__()
        self.change = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, bias)

    def forward(self, x):
        g = torch.sigmoid(self.gate(x))
        return g * torch.relu(self.change(x)) + (1 - g) * x


net = nn.Sequential(
    nn.Linear(6, 24), nn.Tanh(), Highway(24, -1.0), Highway(24, -12.0), nn.Linear(24, 1)
)
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
w = 0.4 * torch.randn(6, 1)
for step in range(200):
    x = torch.randn(32, 6)
    y = torch.cos(x @ w)
    with torch.autocast("cpu", dtype=torch.float16):
        z = net(x)
    loss = nn.functional.mse_loss(z.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 40 == 0:
        print(step, round(loss.item(), 4))
