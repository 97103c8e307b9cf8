"""Learn classes that are stored file by file; one window covers all files."""

import json
from dataclasses import dataclass

import torch
import torch.nn as nn

FILES, DIM = 6, 12


@dataclass
class Config:
    lr: float = 0.9
    windows: int = 40
    step_every: int = 1
    zero_every: int = FILES


class Loop:
    def __init__(self, network, config):
        self.network = network
        self.config = config
        self.optimizer = torch.optim.SGD(network.parameters(), lr=config.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.losses, self.taken, self.skipped = [], 0, 0

    def micro_batch(self, count, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.network(x), y)
        self.scaler.scale(loss).backward()
        self.losses.append(loss.item())
        if count % self.config.step_every == 0:
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < scale:
                self.skipped += 1
            else:
                self.taken += 1
        if count % self.config.zero_every == 0:
            self.optimizer.zero_grad()


def stream(windows):
    prototypes = 0.6 * torch.randn(FILES, DIM)
    for _ in range(windows):
        for label, prototype in enumerate(prototypes):
            x = prototype + 0.4 * torch.randn(8, DIM)
            yield x, torch.full((8,), label)


torch.manual_seed(2)
config = Config()
loop = Loop(nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, FILES)), config)
for count, (x, y) in enumerate(stream(config.windows), start=1):
    loop.micro_batch(count, x, y)
    if count % 60 == 0:
        print(count, sum(loop.losses[-FILES:]) / FILES)

last = sum(loop.losses[-2 * FILES :]) / (2 * FILES)
print(
    json.dumps(
        {
            "first_loss": sum(loop.losses[:FILES]) / FILES,
            "last_loss": last if last == last else "nan",
            "scale": loop.scaler.get_scale(),
            "taken": loop.taken,
            "skipped": loop.skipped,
        }
    )
)
