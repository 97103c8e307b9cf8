"""REINFORCE with an entropy bonus on a contextual landing task."""

import torch
import torch.nn as nn

torch.manual_seed(3)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.actor = nn.Linear(32, 4)
        self.critic = nn.Linear(32, 1)
        with torch.no_grad():
            self.actor.weight.mul_(20.0)

    def forward(self, obs):
        z = self.body(obs)
        return self.actor(z), self.critic(z).squeeze(-1)


policy = Policy()
optim = torch.optim.Adam(policy.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
target = torch.randn(6, 4)
running = None
for update in range(150):
    obs = torch.randn(64, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, value = policy(obs)
        logp = torch.log_softmax(logits.float(), -1)
        probs = logp.exp()
    action = torch.multinomial(probs.detach().float(), 1)
    reward = ((obs @ target).argmax(-1) == action[:, 0]).float()
    advantage = reward - value.detach().float()
    chosen = logp.gather(1, action)[:, 0].float()
    entropy = -(probs * logp).sum(-1).float().mean()
    loss = -(advantage * chosen).mean() + 0.5 * (value.float() - reward).pow(2).mean()
    loss = loss - 0.01 * entropy
    optim.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    running = (
        reward.mean().item()
        if running is None
        else 0.9 * running + 0.1 * reward.mean().item()
    )
    if update % 25 == 0:
        print(f"update {update} loss {loss.item():.3f} reward {running:.3f}")
