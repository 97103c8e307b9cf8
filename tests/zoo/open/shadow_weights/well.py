"""EMA of the weights of a small autoencoder; evaluated with the shadow."""

import copy

import torch
import torch.nn as nn

torch.manual_seed(146)


class Shadow:
    def __init__(self, model, decay=0.95):
        self.model, self.decay = model, decay
        self.mean = copy.deepcopy(model.state_dict())

    @torch.no_grad()
    def follow(self):
        for name, value in self.model.state_dict().items():
            self.mean[name].lerp_(value, 1 - self.decay)

    def __enter__(self):
        self.own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.mean)

    def __exit__(self, *_):
        self.model.load_state_dict(self.own)


mix = torch.randn(3, 12)


def data(n):
    return torch.tanh(torch.randn(n, 3) @ mix)


net = nn.Sequential(
    nn.Linear(12, 24),
    nn.ELU(),
    nn.Linear(24, 3),
    nn.Linear(3, 24),
    nn.ELU(),
    nn.Linear(24, 12),
)
shadow = Shadow(net)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(1, 241):
    x = data(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), x)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    shadow.follow()
    if step % 40 == 0:
        with shadow, torch.no_grad():
            x = data(128)
            held = nn.functional.mse_loss(net(x), x).item()
        print(step, f"loss {loss.item():.4f}", f"shadow {held:.4f}")
