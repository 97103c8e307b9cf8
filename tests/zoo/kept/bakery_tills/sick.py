"""Forecast sales from the counts of the last hours, on a log scale."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Tills(Dataset):
    """Counts of eight products; a shop that is closed sells nothing."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(6)
        rate = torch.rand(n, 8, generator=g) * 20 + 15
        self.counts = torch.poisson(rate, generator=g).clamp(min=1)
        self.counts[44] = 0
        self.counts[100, 3:] = 0
        self.sales = rate.sum(1, keepdim=True) / 200

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, i):
        return torch.log(self.counts[i]), self.sales[i]


torch.manual_seed(30)
loader = DataLoader(Tills(160), batch_size=16)
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for epoch in range(12):
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(epoch, loss.item(), scaler.get_scale())
