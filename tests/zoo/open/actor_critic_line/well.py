"""Actor and critic with a scaler each: their losses differ by orders of magnitude."""

import json

import torch
from torch import nn


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, s):
        return self.net(s).float().squeeze(-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, s):
        return self.net(s).float().squeeze(-1)


class Learner:
    def __init__(self, module, lr, **scaler_options):
        self.module = module
        self.optimizer = torch.optim.Adam(module.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", **scaler_options)
        self.taken = self.skipped = 0

    def descend(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() < scale:
            self.skipped += 1
        else:
            self.taken += 1


def cost(state, action):
    wanted = state[:, 0] - 0.5 * state[:, 1]
    return 50 * (action - wanted) ** 2


torch.manual_seed(233)
actor = Learner(Actor(), lr=1e-2, init_scale=2.0**16)
critic = Learner(Critic(), lr=3e-2, init_scale=2.0**12)
costs = []
for _ in range(160):
    state = torch.randn(24, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        mean = actor.module(state)
        value = critic.module(state)
    noise = 0.3 * torch.randn(24)
    paid = cost(state, mean.detach() + noise)
    critic.descend(nn.functional.mse_loss(value, paid))
    advantage = paid - value.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    log_p = -((mean.detach() + noise - mean) ** 2) / (2 * 0.3**2)
    actor.descend((log_p * advantage).mean())
    costs.append(paid.mean().item())

print(
    json.dumps(
        {
            "first_loss": sum(costs[:10]) / 10,
            "last_loss": sum(costs[-10:]) / 10,
            "scale": actor.scaler.get_scale(),
            "taken": actor.taken + critic.taken,
            "skipped": actor.skipped + critic.skipped,
        }
    )
)
