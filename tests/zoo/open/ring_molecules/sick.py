"""Equivariant message passing on toy molecules; positions move from layer to layer."""

import torch
import torch.nn as nn

torch.manual_seed(6)


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * dim + 1, dim), nn.SiLU())
        self.push = nn.Linear(dim, 1)
        self.node = nn.Linear(2 * dim, dim)

    def forward(self, h, pos):
        n = h.shape[1]
        diff = pos[:, :, None] - pos[:, None]
        dist = diff.pow(2).sum(-1, keepdim=True).sqrt()
        pair = torch.cat(
            [
                h[:, :, None].expand(-1, -1, n, -1),
                h[:, None].expand(-1, n, -1, -1),
                dist,
            ],
            -1,
        )
        m = self.edge(pair)
        pos = pos + (diff * torch.tanh(self.push(m).float())).mean(2)
        h = h + torch.tanh(self.node(torch.cat([h, m.float().mean(2)], -1))).float()
        return h, pos


class EGNN(nn.Module):
    def __init__(self, dim=12, depth=3):
        super().__init__()
        self.embed = nn.Embedding(4, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(depth)])
        self.energy = nn.Linear(dim, 1)

    def forward(self, kind, pos):
        h = self.embed(kind)
        for layer in self.layers:
            h, pos = layer(h, pos)
        return self.energy(h).float().sum(1)


def molecules(n):
    kind = torch.randint(0, 4, (n, 6))
    pos = torch.randn(n, 6, 3)
    d = torch.cdist(pos, pos)
    energy = (torch.exp(-d) * (kind[:, :, None] == kind[:, None])).sum((1, 2))
    return kind, pos, (energy[:, None] - 9.0) / 2


net = EGNN()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(80):
    kind, pos, energy = molecules(8)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(kind, pos)
    loss = (guess - energy).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    if step % 16 == 0:
        print(step, round(loss.item(), 3), scaler.get_scale())
