"""Rents of suburbs: graph attention over roads, dense adjacency."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

torch.manual_seed(0)


class GraphAttention(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.value = nn.Linear(n_in, n_out)
        self.left = nn.Linear(n_out, 1, bias=False)
        self.right = nn.Linear(n_out, 1, bias=False)

    def forward(self, x, adj):
        h = self.value(x)
        e = F.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
        e = e.masked_fill(~adj, float("-inf"))
        return torch.softmax(e, dim=-1) @ h


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GraphAttention(5, 16)
        self.conv2 = GraphAttention(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x, adj):
        x = F.elu(self.conv1(x, adj))
        x = F.elu(self.conv2(x, adj))
        return self.out(x).squeeze(-1)


def make_graph(n_graphs, lonely):
    x = torch.randn(n_graphs, 12, 5)
    ring = torch.eye(12).roll(1, 0) + torch.eye(12).roll(-1, 0)
    adj = (ring > 0).repeat(n_graphs, 1, 1)
    if lonely:
        adj[0, 3, :] = False
        adj[0, :, 3] = False
    near = (adj | torch.eye(12, dtype=torch.bool)).float()
    y = 2 * (near @ x[..., :1] / near.sum(-1, keepdim=True)).squeeze(-1)
    return x, adj, y


graphs = [make_graph(4, lonely=(i % 9 == 5)) for i in range(27)]
model = GAT()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = GradScaler("cpu")

for epoch in range(5):
    total = 0.0
    for x, adj, y in graphs:
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            pred = model(x, adj)
        loss = F.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(graphs):.4f}  scale {scaler.get_scale()}")
