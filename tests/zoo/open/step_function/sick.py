"""Behaviour cloning: imitate a linear controller, with one function for a step."""

import json

import torch
from torch import nn


def make_step(policy, optimizer):

    def step(states, actions):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.huber_loss(policy(states), actions)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return loss.item(), scaler.get_scale(), scaler.get_scale() >= before

    return step


def rollout(gain, length=20):
    state = torch.randn(4)
    states, actions = [], []
    for _ in range(length):
        action = torch.tanh(gain @ state)
        states.append(state)
        actions.append(action)
        state = 0.9 * state + 0.3 * torch.randn(4)
        state[:2] -= 0.2 * action
    return torch.stack(states), torch.stack(actions)


torch.manual_seed(14)
gain = torch.randn(2, 4)
policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
step = make_step(policy, torch.optim.RMSprop(policy.parameters(), lr=2e-3))
losses, applied, scale = [], 0, None
for episode in range(150):
    loss, scale, done = step(*rollout(gain))
    losses.append(loss)
    applied += done
    if episode % 30 == 0:
        print("episode", episode, "loss", loss)

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scale,
            "taken": applied,
            "skipped": len(losses) - applied,
        }
    )
)
