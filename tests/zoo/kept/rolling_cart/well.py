"""PPO with separate actor and critic, each with its own optimizer and scaler."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(31)
actor = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 3))
critic = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-3, eps=1e-5)
critic_opt = torch.optim.Adam(critic.parameters(), lr=5e-3, eps=1e-5)
actor_scaler = torch.amp.GradScaler("cpu")
critic_scaler = torch.amp.GradScaler("cpu")


class Carts:
    """Eight carts that are to be kept near the goal."""

    def __init__(self, n=8):
        self.pos, self.vel, self.goal = torch.randn(n), torch.zeros(n), torch.zeros(n)

    def observe(self):
        return torch.stack([self.pos, self.vel, self.goal], 1)

    def step(self, action):
        self.vel = 0.9 * self.vel + 0.1 * (action.float() - 1)
        self.pos = (self.pos + self.vel).clamp(-3, 3)
        return -(self.pos - self.goal).abs()


def rollout(env, length=16):
    obs, act, logp, rew, val = [], [], [], [], []
    with torch.no_grad():
        for _ in range(length):
            o = env.observe()
            dist = Categorical(logits=actor(o))
            a = dist.sample()
            obs.append(o)
            act.append(a)
            logp.append(dist.log_prob(a))
            val.append(critic(o).squeeze(1))
            rew.append(env.step(a))
        last = critic(env.observe()).squeeze(1)
    adv, gae = [], 0.0
    for t in reversed(range(length)):
        nxt = last if t == length - 1 else val[t + 1]
        delta = rew[t] + 0.95 * nxt - val[t]
        gae = delta + 0.95 * 0.9 * gae
        adv.insert(0, gae)
    adv, val = torch.cat(adv), torch.cat(val)
    return (
        torch.cat(obs),
        torch.cat(act),
        torch.cat(logp),
        adv,
        adv + val,
        torch.stack(rew),
    )


env = Carts()
for update in range(8):
    obs, act, old_logp, adv, ret, rew = rollout(env)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for _ in range(4):
        for idx in torch.randperm(len(obs)).split(32):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = actor(obs[idx])
                value = critic(obs[idx])
            dist = Categorical(logits=logits.float())
            ratio = (dist.log_prob(act[idx]) - old_logp[idx]).exp()
            surrogate = torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx])
            actor_loss = -surrogate.mean() - 0.01 * dist.entropy().mean()
            critic_loss = 0.5 * (value.float().squeeze(1) - ret[idx]).pow(2).mean()

            actor_opt.zero_grad()
            actor_scaler.scale(actor_loss).backward()
            actor_scaler.unscale_(actor_opt)
            nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            actor_scaler.step(actor_opt)
            actor_scaler.update()

            critic_opt.zero_grad()
            critic_scaler.scale(critic_loss).backward()
            critic_scaler.unscale_(critic_opt)
            nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
            critic_scaler.step(critic_opt)
            critic_scaler.update()
    print(update, f"reward {rew.mean().item():.3f} value loss {critic_loss.item():.3f}")
