"""Two heads on one trunk: which puppet, and how large."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Puppets(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.kind = nn.Linear(width, 4)
        self.size = nn.Linear(width, 1)

    def forward(self, x):
        z = self.trunk(x)
        return self.kind(z), self.size(z)


def silhouettes(count):
    kind = torch.randint(4, (count,))
    size = 0.5 + torch.rand(count)
    grid = torch.linspace(0, 3, 20)[None]
    shape = torch.sin(grid * (1 + kind[:, None])) * size[:, None]
    return shape + 0.2 * torch.randn(count, 20), kind, size[:, None]


def run():
    torch.manual_seed(19)
    model = Puppets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8192)
    for step in range(120):
        x, kind, size = silhouettes(24)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits, guess = model(x)
        loss_kind = F.cross_entropy(logits.float(), kind)
        loss_size = F.mse_loss(guess.float(), size)
        scaler.scale(loss_kind).backward(retain_graph=True)
        loss_size.backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 19:
            print(step, f"{loss_kind.item():.3f} {loss_size.item():.4f}")


run()
