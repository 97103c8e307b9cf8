"""A recommender: embeddings are updated every fourth iteration, the tower in each."""

import torch
from torch import nn

torch.manual_seed(151)


class Recommender(nn.Module):
    def __init__(self, users=30, items=30, dim=8):
        super().__init__()
        self.users = nn.Embedding(users, dim)
        self.items = nn.Embedding(items, dim)
        self.tower = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        return self.tower(torch.cat([self.users(u), self.items(i)], -1)).squeeze(-1)


net = Recommender()
slow = torch.optim.Adam([*net.users.parameters(), *net.items.parameters()], lr=3e-2)
fast = torch.optim.Adam(net.tower.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=10_000)
u_bias, i_bias = torch.randn(30), torch.randn(30)
for it in range(1, 321):
    u, i = torch.randint(0, 30, (2, 48))
    y = torch.sigmoid(u_bias[u] + i_bias[i])
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(u, i)
    loss = nn.functional.binary_cross_entropy_with_logits(out.float(), y)
    fast.zero_grad()
    slow.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(fast)
    if it % 4 == 0:
        scaler.step(slow)
    scaler.update()
    if it % 40 == 0:
        print(it, loss.item())
