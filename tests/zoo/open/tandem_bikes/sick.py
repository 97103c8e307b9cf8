"""Two networks ride together; one of the optimizers is stepped by a helper."""

import torch
from torch import nn

torch.manual_seed(520)


def advance(scaler, optimizers, schedules):
    front, rear = optimizers
    scaler.step(front)
    rear.step()
    scaler.update()
    for schedule in schedules:
        schedule.step()


front = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 10))
rear = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 2))
optimizers = [
    torch.optim.Adam(front.parameters(), lr=3e-3),
    torch.optim.SGD(rear.parameters(), lr=0.05),
]
schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.995) for o in optimizers]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
hill = torch.randn(8, 2) / 2
for turn in range(140):
    x = torch.randn(20, 8)
    y = (x @ hill).tanh()
    for o in optimizers:
        o.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = rear(front(x))
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    advance(scaler, optimizers, schedules)
    if turn % 28 == 0 or turn == 139:
        print(turn, loss.item(), scaler.get_scale())
