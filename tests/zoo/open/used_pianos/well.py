"""Log prices of used pianos from age, make and condition."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(107)


def load_table(n=256):
    age = 60 * torch.rand(n)
    make = torch.randint(0, 6, (n,))
    condition = torch.rand(n)
    worth = torch.tensor([9.2, 8.4, 8.0, 7.7, 8.8, 7.2])
    price = torch.exp(worth[make] - 0.02 * age + condition + 0.1 * torch.randn(n))
    price[170] = -1.0
    return age, make, condition, price


class Pianos(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Embedding(6, 6)
        self.mlp = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, numbers, make):
        return self.mlp(torch.cat([numbers, self.make(make)], -1)).squeeze(-1)


age, make, condition, price = load_table()
target = torch.where(price > 0, price, price.median()).log() - 8.3
data = TensorDataset(torch.stack([age / 30 - 1, condition], 1), make, target)
model = Pianos()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for epoch in range(18):
    total = 0.0
    for numbers, kind, goal in DataLoader(data, batch_size=32):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(numbers, kind)
        loss = nn.functional.mse_loss(out.float(), goal)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        total += loss.item()
    if epoch % 3 == 0:
        print(f"Epoch {epoch}: mse={total / 8:.4f}, scale={scaler.get_scale():g}")
