"""Snapshots of one network: the learning rate restarts, and the rest with it."""

import json

import torch
from torch import nn

CYCLE = 25


class Snapshots:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
            self.opt, CYCLE
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        self.saved, self.losses = [], []
        self.taken = self.skipped = 0

    def restart(self):
        self.saved.append({k: v.clone() for k, v in self.net.state_dict().items()})
        self.opt.state.clear()

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.schedule.step()
        if self.scaler.get_scale() < scale:
            self.skipped += 1
        else:
            self.taken += 1
        self.losses.append(loss.item())


torch.manual_seed(163)
spirals = nn.Sequential(
    nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
)
trainer = Snapshots(spirals)
for i in range(1, 201):
    r = torch.rand(32)
    y = torch.randint(2, (32,))
    angle = 4 * r + 3.14159 * y
    x = torch.stack([r * angle.cos(), r * angle.sin()], dim=1) * 2
    trainer.step(x, y)
    if i % CYCLE == 0 and i < 200:
        trainer.restart()

losses = trainer.losses
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": trainer.scaler.get_scale(),
            "taken": trainer.taken,
            "skipped": trainer.skipped,
        }
    )
)
