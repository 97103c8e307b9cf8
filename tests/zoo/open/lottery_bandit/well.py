"""A contextual bandit whose prizes have a heavy tail."""

import json

import torch
from torch import nn

ARMS = 4


class Bandit:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.policy = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, ARMS))
        self.world = torch.randn(6, ARMS)
        self.optimizer = torch.optim.RMSprop(self.policy.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=40)
        self.regrets, self.lost = [], []

    def play(self, n=32):
        context = torch.randn(n, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.policy(context)
        log_p = logits.float().log_softmax(-1)
        arm = torch.multinomial(log_p.exp().detach(), 1)
        value = (context @ self.world).gather(1, arm).squeeze(1)
        # A Pareto prize: its variance is infinite.
        prize = torch.distributions.Pareto(1.0, 1.8).sample((n,)) * value
        best = (context @ self.world).max(-1).values
        self.regrets.append((best - value).mean().item())
        return -(log_p.gather(1, arm).squeeze(1) * (prize - prize.median())).mean()

    def learn(self, rounds):
        for round_ in range(rounds):
            loss = self.play()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            scale = self.scaler.get_scale()
            self.scaler.update()
            if self.scaler.get_scale() < scale:
                self.lost.append(round_)


bandit = Bandit(203)
bandit.learn(260)
r = bandit.regrets
print(
    json.dumps(
        {
            "first_loss": sum(r[:20]) / 20,
            "last_loss": sum(r[-20:]) / 20,
            "scale": bandit.scaler.get_scale(),
            "taken": len(r) - len(bandit.lost),
            "skipped": len(bandit.lost),
            "late_skips": sum(i >= 30 for i in bandit.lost),
        }
    )
)
