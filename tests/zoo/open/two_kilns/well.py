"""An autoencoder first; then its encoder with a new head, a new optimizer, one scaler."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(82)
basis = torch.randn(5, 16)


def pots(n):
    kind = torch.randint(0, 5, (n,))
    return basis[kind] + 1.7 * torch.randn(n, 16), kind


class Kiln(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16))


kiln = Kiln()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)


def fire(optimizer, loss_of, n):
    for _ in range(n):
        x, kind = pots(20)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(x, kind)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


adam = torch.optim.Adam(kiln.parameters(), lr=5e-3)
print(
    "first",
    fire(adam, lambda x, _: F.mse_loss(kiln.decoder(kiln.encoder(x)).float(), x), 80),
)

kiln.head = nn.Linear(8, 5)
groups = [
    {"params": kiln.encoder.parameters(), "lr": 0.01},
    {"params": kiln.head.parameters(), "lr": 0.1},
]
sgd = torch.optim.SGD(groups, momentum=0.9)
print(
    "second",
    fire(sgd, lambda x, k: F.cross_entropy(kiln.head(kiln.encoder(x)).float(), k), 80),
)
