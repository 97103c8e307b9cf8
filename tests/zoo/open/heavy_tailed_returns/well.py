"""REINFORCE on a bandit whose rewards are rarely very large."""

import json

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(2)
ARMS, CONTEXT = 4, 6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(CONTEXT, 32)
        self.logits = nn.Linear(32, ARMS)

    def forward(self, context):
        return self.logits(torch.tanh(self.body(context)))


def rewards(context, action):
    best = context[:, :ARMS].argmax(dim=1)
    paid = (action == best).float() - 0.3
    jackpot = (torch.rand(len(action)) < 0.01).float()
    return paid * (1.0 + 300.0 * jackpot)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=60)
regrets, taken, skipped = [], 0, 0
for episode in range(300):
    context = torch.randn(32, CONTEXT)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = policy(context)
    chosen = Categorical(logits=logits.float())
    action = chosen.sample()
    loss = -(chosen.log_prob(action) * rewards(context, action)).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    right = action == context[:, :ARMS].argmax(dim=1)
    regrets.append(1.0 - right.float().mean().item())
    if episode % 50 == 0:
        print(episode, "loss", round(loss.item(), 3), "regret", regrets[-1])

print(
    json.dumps(
        {
            "first_loss": sum(regrets[:20]) / 20,
            "last_loss": sum(regrets[-40:]) / 40,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
