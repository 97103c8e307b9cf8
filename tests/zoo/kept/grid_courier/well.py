"""Double DQN: replay buffer, target network, Huber loss, clipping by value."""

import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(2)
torch.manual_seed(2)
SIZE = 4


def features(pos, goal):
    v = torch.zeros(2 * SIZE * SIZE)
    v[pos] = 1
    v[SIZE * SIZE + goal] = 1
    return v


def move(pos, action):
    r, c = divmod(pos, SIZE)
    dr, dc = ((-1, 0), (1, 0), (0, -1), (0, 1))[action]
    return min(max(r + dr, 0), SIZE - 1) * SIZE + min(max(c + dc, 0), SIZE - 1)


class QNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2 * SIZE * SIZE, 32), nn.ReLU(), nn.Linear(32, 4))


policy, target = QNet(), QNet()
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, amsgrad=True)
scaler = torch.amp.GradScaler("cpu")
memory = deque(maxlen=2000)
learned, score = 0, []
for episode in range(40):
    pos, goal = random.randrange(16), random.randrange(16)
    epsilon = max(0.1, 1 - episode / 25)
    for t in range(10):
        state = features(pos, goal)
        if random.random() < epsilon:
            action = random.randrange(4)
        else:
            with torch.no_grad():
                action = policy(state).argmax().item()
        pos = move(pos, action)
        done = pos == goal
        reward = 1.0 if done else -0.05
        memory.append((state, action, reward, features(pos, goal), float(done)))
        if len(memory) >= 64 and t % 2 == 0:
            s, a, r, s2, d = zip(*random.sample(memory, 32))
            s, s2 = torch.stack(s), torch.stack(s2)
            a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d)
            with torch.autocast("cpu", dtype=torch.float16):
                q = policy(s).gather(1, a[:, None]).squeeze(1)
                with torch.no_grad():
                    best = policy(s2).argmax(1, keepdim=True)
                    y = r + 0.95 * (1 - d) * target(s2).gather(1, best).squeeze(1)
                loss = F.smooth_l1_loss(q.float(), y.float())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(policy.parameters(), 100)
            scaler.step(optimizer)
            scaler.update()
            learned += 1
            if learned % 25 == 0:
                target.load_state_dict(policy.state_dict())
        if done:
            break
    score.append(float(done))
    if episode % 10 == 9:
        print(episode, f"success {sum(score[-10:]) / 10:.1f} updates {learned}")
