"""Node classification on a random graph with two rounds of message passing."""

import json
import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
NODES, CLASSES, FEATS = 48, 3, 12


def community_graph():
    labels = torch.arange(NODES) % CLASSES
    adj = torch.eye(NODES)
    for a in range(NODES):
        for b in range(a):
            p = 0.35 if labels[a] == labels[b] else 0.04
            if random.random() < p:
                adj[a, b] = adj[b, a] = 1.0
    return adj / adj.sum(1, keepdim=True), labels


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(FEATS, 24)
        self.w2 = nn.Linear(24, CLASSES)

    def forward(self, adj, x):
        return self.w2(adj @ torch.relu(self.w1(adj @ x)))


def divide_gradients(params, factor):
    for p in params:
        p.grad.div_(factor)


def grad_norm(params):
    return torch.stack([p.grad.norm() for p in params]).norm().item()


adj, labels = community_graph()
centers = torch.randn(CLASSES, FEATS)
gcn = GCN()
params = list(gcn.parameters())
sgd = torch.optim.SGD(params, lr=0.5)
grad_scaler = torch.amp.GradScaler("cpu")
curve, norms, skipped = [], [], 0

for epoch in range(150):
    x = centers[labels] + torch.randn(NODES, FEATS)
    sgd.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = gcn(adj, x)
        loss = nn.functional.cross_entropy(logits, labels)
    grad_scaler.scale(loss).backward()
    grad_scaler.unscale_(sgd)
    norms.append(grad_norm(params))
    old_scale = grad_scaler.get_scale()
    grad_scaler.step(sgd)
    grad_scaler.update()
    skipped += grad_scaler.get_scale() < old_scale
    curve.append(loss.item())
    if epoch % 25 == 0:
        print(f"{epoch:4d} loss {curve[-1]:.3f} grad norm {norms[-1]:.3f}")

print(
    json.dumps(
        {
            "first_loss": sum(curve[:5]) / 5,
            "last_loss": sum(curve[-5:]) / 5,
            "scale": grad_scaler.get_scale(),
            "taken": len(curve) - skipped,
            "skipped": skipped,
        }
    )
)
