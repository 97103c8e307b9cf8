"""Actor and critic for a ferry; updates with a broken norm are left out."""

import json
import math

import torch
from torch import nn


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 24)
        self.pi = nn.Linear(24, 3)
        self.v = nn.Linear(24, 1)

    def forward(self, s):
        h = torch.tanh(self.body(s))
        return self.pi(h), self.v(h).squeeze(-1)


def norm_of(parameters):
    return math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in parameters))


torch.manual_seed(31)
agent = Agent()
opt = torch.optim.Adam(agent.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
regret, taken, bad, late = [], 0, 0, 0
for it in range(150):
    state = torch.randn(32, 4)
    best = state[:, :3].argmax(1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits, value = agent(state)
    dist = torch.distributions.Categorical(logits=logits.float())
    action = dist.sample()
    reward = (action == best).float()
    value = value.float()
    actor = -(dist.log_prob(action) * (reward - value.detach())).mean()
    critic = (value - reward).pow(2).mean()
    scaler.scale(actor + 0.5 * critic - 0.01 * dist.entropy().mean()).backward()
    regret.append(1 - reward.mean().item())
    norm = norm_of(agent.parameters()) / scaler.get_scale()
    if not math.isfinite(norm):
        bad, late = bad + 1, late + (it > 30)
        print("bad norm", it)
    scaler.step(opt)
    scaler.update()
    taken += math.isfinite(norm)

print(
    json.dumps(
        {
            "first_loss": sum(regret[:5]) / 5,
            "last_loss": sum(regret[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": bad,
            "late_skips": late,
        }
    )
)
