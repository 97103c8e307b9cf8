"""Contrastive pairs in chunks: the loss goes backward to cached embeddings first."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(271)
left = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
right = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 8))
optimizer = torch.optim.Adam([*left.parameters(), *right.parameters()], lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
first, second = torch.randn(5, 12), torch.randn(5, 9)


def couplets(n):
    z = torch.randn(n, 5)
    return z @ first + 0.1 * torch.randn(n, 12), z @ second + 0.1 * torch.randn(n, 9)


def embed(net, x):
    with torch.autocast("cpu", dtype=torch.float16):
        return net(x)


for step in range(90):
    a, b = couplets(24)
    chunks = list(zip(a.split(8), b.split(8)))
    # 1. Embeddings of all chunks, without a graph.
    with torch.no_grad():
        cache = [(embed(left, x).float(), embed(right, y).float()) for x, y in chunks]
    u = torch.cat([p for p, _ in cache]).requires_grad_()
    v = torch.cat([q for _, q in cache]).requires_grad_()
    # 2. The loss over the whole batch, and its gradient at the embeddings.
    scores = F.normalize(u, dim=1) @ F.normalize(v, dim=1).T / 0.2
    loss = F.cross_entropy(scores, torch.arange(24))
    scaler.scale(loss).backward()
    # 3. Chunk by chunk through the networks. The cached gradients hold the scale already.
    optimizer.zero_grad()
    for (x, y), gu, gv in zip(chunks, u.grad.split(8), v.grad.split(8)):
        surrogate = (embed(left, x).float() * gu).sum() + (
            embed(right, y).float() * gv
        ).sum()
        surrogate.backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 0 or step == 89:
        print(step, round(loss.item(), 4), scaler.get_scale())
