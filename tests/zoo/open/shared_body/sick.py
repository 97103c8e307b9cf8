"""Advantage actor-critic, shared body, two backward passes and one optimizer."""

import torch
from torch import nn


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 32)
        self.critic = nn.Linear(32, 1)
        self.actor = nn.Linear(32, 3)

    def forward(self, obs):
        z = torch.tanh(self.body(obs))
        return self.actor(z).float(), self.critic(z).float().squeeze(-1)


class Learner:
    def __init__(self):
        self.agent = Agent()
        self.opt = torch.optim.Adam(self.agent.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def learn(self, obs, pay):
        with torch.autocast("cpu", dtype=torch.float16):
            logits, value = self.agent(obs)
        pi = torch.distributions.Categorical(logits=logits)
        action = pi.sample()
        reward = pay(obs, action)
        critic_loss = nn.functional.mse_loss(value, reward)
        actor_loss = -((reward - value.detach()) * pi.log_prob(action)).mean()
        actor_loss = actor_loss - 0.02 * pi.entropy().mean()
        self.scaler.scale(critic_loss).backward(retain_graph=True)
        self.opt.zero_grad()
        self.scaler.scale(actor_loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return critic_loss.item(), reward.mean().item()


torch.manual_seed(128)
worth = torch.randn(4, 3)
learner = Learner()
for turn in range(200):
    critic_loss, reward = learner.learn(
        torch.randn(32, 4), lambda obs, a: 3 + (obs @ worth).gather(1, a[:, None])[:, 0]
    )
    if turn % 25 == 0:
        print(f"turn {turn}: critic {critic_loss:.3f} reward {reward:.3f}")
