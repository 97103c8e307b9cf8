"""Policy over legal moves: illegal ones get -inf, but every state has a legal one."""

import torch
from torch import nn

torch.manual_seed(110)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 24)
        self.pi = nn.Linear(24, 4)
        self.value = nn.Linear(24, 1)

    def forward(self, s, legal):
        h = torch.relu(self.body(s))
        logits = self.pi(h).float().masked_fill(~legal, float("-inf"))
        return logits, self.value(h).float().squeeze(-1)


policy = Policy()
opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
mean = 0.0
for episode in range(130):
    s = torch.randn(32, 6)
    legal = torch.rand(32, 4) < 0.6
    legal[torch.arange(32), torch.randint(0, 4, (32,))] = True
    with torch.autocast("cpu", dtype=torch.float16):
        logits, value = policy(s, legal)
    dist = torch.distributions.Categorical(logits=logits)
    action = dist.sample()
    reward = s[torch.arange(32), action] + 0.1 * torch.randn(32)
    advantage = reward - value
    loss = (
        -(dist.log_prob(action) * advantage.detach()).mean()
        + 0.5 * advantage.square().mean()
    )
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    scaler.step(opt)
    scaler.update()
    mean = 0.9 * mean + 0.1 * reward.mean().item()
    if episode % 26 == 0:
        print(episode, f"{mean:.3f}")
