"""A message-passing net whose layers are kept in a list."""

import torch
import torch.nn as nn

torch.manual_seed(91)


class TourNet(nn.Module):
    def __init__(self, width=16, rounds=3):
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.rounds = [nn.Linear(2 * width, width) for _ in range(rounds)]
        self.read = nn.Linear(width, 1)

    def forward(self, nodes, adjacency):
        h = torch.relu(self.lift(nodes))
        for layer in self.rounds:
            near = adjacency @ h / adjacency.sum(-1, keepdim=True)
            h = h + torch.relu(layer(torch.cat([h, near], -1)))
        return self.read(h.mean(1)).squeeze(-1)


def graphs(n, size=7):
    xy = torch.rand(n, size, 2)
    dist = torch.cdist(xy, xy)
    return xy, (dist < 0.5).float(), dist.mean((1, 2)) * 4


net = TourNet()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for it in range(100):
    xy, adj, target = graphs(16)
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(xy, adj)
    loss = (guess.float() - target).abs().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 20 == 0:
        print(it, loss.item())
