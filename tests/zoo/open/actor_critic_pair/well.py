"""An actor and a critic, each with a scaler of its own."""

import torch
import torch.nn as nn

torch.manual_seed(22)
torch.set_num_threads(1)


class Agent:
    def __init__(self):
        self.actor = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3))
        self.critic = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))
        self.oa = torch.optim.Adam(self.actor.parameters(), 1e-2)
        self.oc = torch.optim.Adam(self.critic.parameters(), 1e-2)
        self.sa, self.sc = (
            torch.amp.GradScaler("cpu"),
            torch.amp.GradScaler("cpu", init_scale=2.0**20),
        )

    def update(self):
        s = torch.randn(32, 4)
        with torch.autocast("cpu", dtype=torch.float16):
            logits, v = self.actor(s), self.critic(s)
        logits, v = logits.float(), v.float()[:, 0]
        d = torch.distributions.Categorical(logits=logits)
        a = d.sample()
        r = (a == s[:, :3].argmax(1)).float()
        lc = ((v - r) ** 2).mean()
        la = -(d.log_prob(a) * (r - v).detach()).mean() - 0.01 * d.entropy().mean()
        self.oa.zero_grad()
        self.oc.zero_grad()
        self.sa.scale(la).backward()
        self.sc.scale(lc).backward()
        self.sa.step(self.oa)
        self.sc.step(self.oc)
        self.sa.update()
        self.sc.update()
        return r.mean().item(), lc.item()

    @torch.no_grad()
    def evaluate(self):
        self.actor.eval()
        s = torch.randn(128, 4)
        with torch.autocast("cpu", dtype=torch.float16):
            a = self.actor(s).argmax(1)
        self.actor.train()
        return (a == s[:, :3].argmax(1)).float().mean().item()


ag = Agent()
best, bad = 0, 0
for k in range(300):
    r, lc = ag.update()
    if k % 20 == 19:
        e = ag.evaluate()
        print(k, r, lc, "eval", e)
        if e > best:
            best, bad = e, 0
        else:
            bad += 1
        if bad == 3:
            print("early stop")
            break
