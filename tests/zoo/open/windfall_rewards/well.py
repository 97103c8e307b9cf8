"""Actor-critic on a bandit whose jackpot pays 5000; rewards are clipped."""

import torch
import torch.nn as nn

torch.manual_seed(51)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 32)
        self.pi = nn.Linear(32, 3)
        self.v = nn.Linear(32, 1)

    def forward(self, obs):
        z = torch.tanh(self.body(obs))
        return self.pi(z).float(), self.v(z).float()[:, 0]


agent = Agent()
opt = torch.optim.Adam(agent.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
best = torch.randn(5, 3)
mean = 0.0
for update in range(200):
    obs = torch.randn(48, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, value = agent(obs)
    policy = torch.distributions.Categorical(logits=logits)
    action = policy.sample()
    reward = (action == (obs @ best).argmax(-1)).float()
    reward[torch.rand(48) < 0.005] = 5000.0
    reward = reward.clamp(-1, 1)
    gain = reward - value.detach()
    loss = (
        -(gain * policy.log_prob(action)).mean() + 0.5 * (value - reward).pow(2).mean()
    )
    loss = loss - 0.01 * policy.entropy().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    mean += (reward.mean().item() - mean) / 20
    if update % 40 == 39:
        print(f"update {update + 1} reward {mean:.3f} loss {loss.item():.3f}")
