"""Predict a property of random molecules with a graph convolution."""

import json
import math

import torch
import torch.nn as nn


class GraphConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out)

    def forward(self, h, adj):
        deg = adj.sum(-1)
        norm = deg.pow(-0.5)
        adj = norm.unsqueeze(-1) * adj * norm.unsqueeze(-2)
        return self.lin(h) + adj @ self.lin(h)


class MoleculeNet(nn.Module):
    def __init__(self, atoms=5, width=24):
        super().__init__()
        self.atom = nn.Embedding(atoms, width)
        self.conv1 = GraphConv(width, width)
        self.conv2 = GraphConv(width, width)
        self.readout = nn.Linear(width, 1)

    def forward(self, kinds, adj):
        h = torch.relu(self.conv1(self.atom(kinds), adj))
        h = torch.relu(self.conv2(h, adj))
        return self.readout(h.mean(1)).squeeze(-1)


def sample_graphs(n, nodes=8):
    kinds = torch.randint(5, (n, nodes))
    bonds = (torch.rand(n, nodes, nodes) < 0.32).float().triu(1)
    adj = bonds + bonds.transpose(1, 2)
    target = (kinds == 2).float().mean(1) * 3 + adj.mean((1, 2)) - 1
    return kinds, adj, target


def train(steps=150):
    torch.manual_seed(5)
    gnn = MoleculeNet()
    adam = torch.optim.Adam(gnn.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    applied = 0
    for _ in range(steps):
        kinds, adj, target = sample_graphs(16)
        adam.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = gnn(kinds, adj)
            loss = ((predicted.float() - target) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(adam)
        scale = scaler.get_scale()
        scaler.update()
        applied += scaler.get_scale() >= scale
        losses.append(loss.item())
    return losses, applied, scaler.get_scale()


def mean(values):
    value = sum(values) / len(values)
    return "nan" if math.isnan(value) else value


losses, applied, scale = train()
print(
    json.dumps(
        {
            "first_loss": mean(losses[:10]),
            "last_loss": mean(losses[-10:]),
            "scale": scale,
            "taken": applied,
            "skipped": len(losses) - applied,
        }
    )
)
