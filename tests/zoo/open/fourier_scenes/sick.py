"""Continue a coordinate network from a checkpoint."""

import io

import torch
from torch import nn


class Scene(nn.Module):
    def __init__(self, bands=18):
        super().__init__()
        self.freq = nn.Parameter(2.0 ** torch.arange(bands))
        self.net = nn.Sequential(nn.Linear(2 * bands, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        angle = x * self.freq
        return self.net(torch.cat([angle.sin(), angle.cos()], -1))


def checkpoint(model):
    """What an earlier run has left on the disk."""
    file = io.BytesIO()
    torch.save({k: v.half() for k, v in model.state_dict().items()}, file)
    file.seek(0)
    return file


torch.manual_seed(48)
scene = Scene()
scene.load_state_dict(torch.load(checkpoint(Scene()), weights_only=True))
opt = torch.optim.Adam(
    [{"params": scene.net.parameters()}, {"params": [scene.freq], "lr": 1e-6}], lr=3e-3
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for it in range(90):
    x = torch.rand(32, 1)
    colour = torch.cat([x, (6 * x).sin(), x**2], 1)
    with torch.autocast("cpu", dtype=torch.float16):
        out = scene(x)
    loss = nn.functional.mse_loss(out.float(), colour)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(scene.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 15 == 0:
        print(it, loss.item())
