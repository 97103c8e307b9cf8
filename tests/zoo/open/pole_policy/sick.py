"""Policy gradient on a line: walk to the target and stay."""

import json

import torch
from torch import nn

LIMIT = 0.5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 24)
        self.actions = nn.Linear(24, 3)

    def forward(self, state):
        return torch.log_softmax(self.actions(torch.tanh(self.body(state))).float(), -1)


def rollout(policy, walkers=16, steps=6):
    place, target = torch.randn(walkers), torch.randn(walkers)
    log_probs, rewards = [], []
    for _ in range(steps):
        log_p = policy(torch.stack([place, target], -1))
        action = torch.distributions.Categorical(logits=log_p.detach()).sample()
        log_probs.append(log_p.gather(1, action[:, None])[:, 0])
        distance = (place - target).abs()
        place = place + 0.4 * (action - 1)
        rewards.append(distance - (place - target).abs())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
    return torch.stack(log_probs), advantage, (place - target).abs().mean()


torch.manual_seed(23)
policy = Policy()


def limited(grad):
    bound = LIMIT
    return grad.clamp(-bound, bound)


for p in policy.parameters():
    p.register_hook(limited)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

distances, skipped = [], 0
for episode in range(130):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        log_probs, advantage, distance = rollout(policy)
    loss = -(log_probs * advantage).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += int(scaler.get_scale() < scale)
    distances.append(distance.item())
    if episode % 25 == 0:
        print(f"episode {episode}: mean distance {distances[-1]:.2f}")

print(
    json.dumps(
        {
            "first_loss": sum(distances[:15]) / 15,
            "last_loss": sum(distances[-15:]) / 15,
            "scale": scaler.get_scale(),
            "taken": len(distances) - skipped,
            "skipped": skipped,
        }
    )
)
