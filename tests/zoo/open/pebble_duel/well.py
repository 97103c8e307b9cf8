"""Self-play at a small matrix game, against copies of the past."""

import copy
import random

import torch
from torch import nn

random.seed(70)
torch.manual_seed(70)
# Payoff of the row player, by state: rock, paper, scissors with changing stakes.
base = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])


class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Linear(4, 16)
        self.act = nn.Linear(16, 3)

    def forward(self, state):
        return self.act(torch.tanh(self.see(state))).float().log_softmax(-1)


def payoff(state, mine, theirs):
    stake = 1 + state[:, 0].clamp(0, 2)
    bonus = (mine == 0).float() * state[:, 1]
    return base[mine, theirs] * stake + bonus


player = Player()
past = [copy.deepcopy(player).eval().requires_grad_(False)]
optimizer = torch.optim.Adam(player.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
baseline = 0.0
for game in range(160):
    state = torch.randn(48, 4)
    rival = random.choice(past)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        theirs = torch.distributions.Categorical(logits=rival(state)).sample()
    with torch.autocast("cpu", dtype=torch.float16):
        logp = player(state)
    policy = torch.distributions.Categorical(logits=logp)
    mine = policy.sample()
    reward = payoff(state, mine, theirs)
    loss = (
        -((reward - baseline) * policy.log_prob(mine)).mean()
        - 0.02 * policy.entropy().mean()
    )
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if game % 20 == 19:
        past = [*past, copy.deepcopy(player).eval().requires_grad_(False)][-4:]
        print(game + 1, "loss", round(loss.item(), 3), "reward", round(baseline, 3))
