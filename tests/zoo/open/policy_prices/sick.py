"""Insurance premiums from age, mileage and the sum insured."""

import torch
from torch import nn

torch.manual_seed(9)


class Premium(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 32)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.price = nn.Linear(32, 1)

    def forward(self, row):
        return self.price(self.body(self.trunk(row)))


def policies(n):
    age = 18 + 60 * torch.rand(n)
    km = 5 + 30 * torch.rand(n)
    insured = torch.exp(8.0 + 3.6 * torch.rand(n))
    garage = (torch.rand(n) < 0.4).float()
    price = (
        1.0
        + 0.01 * km
        - 0.2 * garage
        + 0.3 * (insured.log() - 9.8)
        + 0.005 * (age - 48).abs()
    )
    rows = torch.stack([age / 50, km / 20, insured, garage], 1)
    return rows, price[:, None]


model = Premium()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(200):
    rows, price = policies(32)
    with torch.autocast("cpu", dtype=torch.float16):
        guess = model(rows)
        loss = nn.functional.l1_loss(guess.float(), price)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step % 40 == 0:
        print({"step": step, "loss": loss.item(), "scale": scaler.get_scale()})
