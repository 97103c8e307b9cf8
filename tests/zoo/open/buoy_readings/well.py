"""Wave heights from buoys; a broken sensor writes -999."""

import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast

torch.manual_seed(433)
effect = torch.randn(7, 1) / 2


def readings(n, storm):
    wind = 3 * torch.rand(n, 7)
    height = wind.sqrt() @ effect
    if storm:
        wind[torch.randint(0, n, (2,)), 3] = -999.0
    return wind, height


def prepare(wind):
    return wind.clamp(min=0.0).sqrt()


class Buoy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(7, 32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def main():
    model = Buoy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    for hour in range(150):
        wind, height = readings(20, storm=hour % 13 == 10)
        x = prepare(wind)
        with autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), height)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if hour % 13 in (9, 10):
            print(hour, round(loss.item(), 4), scaler.get_scale())


main()
