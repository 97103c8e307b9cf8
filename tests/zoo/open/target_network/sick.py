"""DQN on a corridor of eleven cells, with a target network."""

import copy
import random

import torch
import torch.nn as nn

random.seed(127)
torch.manual_seed(127)
CELLS = 11


class Corridor:
    def reset(self):
        self.at = random.randrange(CELLS)
        return self.at

    def step(self, action):
        self.at = min(max(self.at + (1 if action else -1), 0), CELLS - 1)
        done = self.at == CELLS - 1
        return self.at, (10.0 if done else -1.0), done


online = nn.Sequential(nn.Linear(CELLS, 32), nn.ReLU(), nn.Linear(32, 2))
target = copy.deepcopy(online)
opt = torch.optim.SGD(online.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu")
memory, env = [], Corridor()
at = env.reset()
one_hot = torch.eye(CELLS)
for step in range(700):
    if random.random() < 0.3:
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = online(one_hot[at]).argmax().item()
    after, reward, done = env.step(action)
    memory.append((at, action, reward, after, float(done)))
    at = env.reset() if done else after
    if step < 100 or step % 4:
        continue
    s, a, r, n, d = map(torch.tensor, zip(*random.sample(memory, 32)))
    with torch.autocast("cpu", dtype=torch.float16):
        q = online(one_hot[s]).gather(1, a[:, None])[:, 0]
        with torch.no_grad():
            best = target(one_hot[n]).amax(1)
    loss = (q.float() - (r + 0.9 * (1 - d) * best.float())).square().mean()
    target.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 40 == 0:
        target.load_state_dict(online.state_dict())
    if step % 100 == 0:
        print(f"step {step} td-error {loss.item():.3f} scale {scaler.get_scale():g}")
