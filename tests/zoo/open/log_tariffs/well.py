"""Trade in logarithms: no trade is -inf in the table, and the model knows what to do."""

import torch
import torch.nn as nn

torch.manual_seed(190)


class Absent(nn.Module):
    """Puts a learnt value where the logarithm is -inf, and says where that was."""

    def __init__(self, columns):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(columns))

    def forward(self, table):
        gone = torch.isinf(table)
        return torch.cat([torch.where(gone, self.value, table), gone.float()], dim=1)


class Tariff(nn.Module):
    def __init__(self):
        super().__init__()
        self.absent = Absent(8)
        self.hidden = nn.Linear(16, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, table):
        return self.out(torch.relu(self.hidden(self.absent(table)))).squeeze(1)


effect = torch.randn(8) / 3


def year():
    volume = torch.poisson(4 * torch.rand(20, 8))
    duty = torch.log1p(volume) @ effect + 0.05 * torch.randn(20)
    return volume.log(), duty


tariff = Tariff()
opt = torch.optim.Adam(tariff.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu")
seen = []
for _ in range(150):
    table, duty = year()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (tariff(table).float() - duty).abs().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    seen.append(loss.item())
print(seen[0], seen[-1], scaler.get_scale())
