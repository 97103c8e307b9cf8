"""Control a chaotic map through a differentiable simulation of growing length."""

import json

import torch
from torch import nn


class Controller(nn.Module):
    def __init__(self):
        super().__init__()
        self.sense = nn.Linear(1, 16)
        self.act = nn.Linear(16, 1)

    def forward(self, state):
        return 0.6 * torch.tanh(self.act(torch.tanh(self.sense(state))))


def simulate(controller, state, horizon):
    cost = 0.0
    for _ in range(horizon):
        push = controller(state)
        state = torch.sin(3.0 * state) + push
        cost = cost + (state.float() - 0.5).square().mean()
    return cost / horizon


torch.manual_seed(0)
controller = Controller()
opt = torch.optim.Adam(controller.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=50)
costs, taken, skipped = [], 0, 0
for iteration in range(160):
    horizon = 4 + iteration // 5
    state = 2.0 * torch.rand(8, 1) - 1.0
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        cost = simulate(controller, state, horizon)
    scaler.scale(cost).backward()
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
    costs.append(cost.item())
    if iteration % 20 == 0:
        print(iteration, horizon, costs[-1], scaler.get_scale())

print(
    json.dumps(
        {
            "first_loss": sum(costs[:5]) / 5,
            "last_loss": sum(costs[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
