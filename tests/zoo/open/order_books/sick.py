"""Mid-price moves from order books; turnover of busy minutes is large."""

import torch
import torch.nn as nn


class Book(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(5, 16)
        self.cell = nn.GRUCell(16, 16)
        self.move = nn.Linear(16, 1)

    def forward(self, minutes):
        h = minutes.new_zeros(len(minutes), 16)
        for t in range(minutes.shape[1]):
            h = self.cell(torch.relu(self.read(minutes[:, t])), h)
        return self.move(h)


def minutes(n, busy):
    x = torch.randn(n, 6, 5)
    y = x[:, -1, :1] - x[:, -2, :1]
    volume = 200 * torch.rand(n, 6)
    if busy:
        volume[0, 2] = 9e4
    x[:, :, 4] = volume
    return x, y


def prepare(x):
    return x


torch.manual_seed(39)
model = Book()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(120):
    x, y = minutes(12, busy=step % 12 == 7)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(prepare(x))
    loss = nn.functional.mse_loss(pred.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item())
