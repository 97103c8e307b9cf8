"""Twin critics every step, the actor every other one; the actor's loss passes a critic."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(300)


def mlp(inp, out):
    return nn.Sequential(nn.Linear(inp, 24), nn.ReLU(), nn.Linear(24, out))


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1 = mlp(5, 1)
        self.q2 = mlp(5, 1)

    def forward(self, state, action):
        x = torch.cat([state, action], 1)
        return self.q1(x).float(), self.q2(x).float()


actor, critics = mlp(3, 2), Critics()
old_actor, old_critics = copy.deepcopy(actor), copy.deepcopy(critics)
actor_opt = torch.optim.Adam(actor.parameters(), lr=2e-3)
critic_opt = torch.optim.Adam(critics.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
dynamics = torch.randn(5, 3) / 3


def world(n=32):
    state = torch.randn(n, 3)
    with torch.no_grad():
        action = torch.tanh(actor(state)) + 0.2 * torch.randn(n, 2)
        after = torch.tanh(torch.cat([state, action], 1) @ dynamics)
    reward = -(action - state[:, :2].sin()).square().sum(1, keepdim=True)
    return state, action, reward, after


for step in range(140):
    state, action, reward, after = world()
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            ahead = torch.tanh(old_actor(after))
            goal = reward + 0.8 * torch.min(*old_critics(after, ahead))
        q1, q2 = critics(state, action)
        critic_loss = F.mse_loss(q1, goal) + F.mse_loss(q2, goal)
    critic_opt.zero_grad()
    scaler.scale(critic_loss).backward()
    scaler.step(critic_opt)
    if step % 2:
        with torch.autocast("cpu", dtype=torch.float16):
            value, _ = critics(state, torch.tanh(actor(state)))
            actor_loss = -value.mean()
        actor_opt.zero_grad()
        scaler.scale(actor_loss).backward()
        scaler.step(actor_opt)
        with torch.no_grad():
            for slow, fast in ((old_actor, actor), (old_critics, critics)):
                for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
                    p.lerp_(q, 0.02)
    scaler.update()
    if step % 20 == 19:
        print(step + 1, critic_loss.item(), actor_loss.item(), reward.mean().item())
