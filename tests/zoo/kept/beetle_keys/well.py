"""MoCo: a momentum encoder, a queue of negatives, InfoNCE at temperature 0.1."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(77)
DIM, K = 12, 64


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 32)
        self.bn = nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, DIM)

    def forward(self, x):
        return F.normalize(self.fc2(F.relu(self.bn(self.fc1(x)))).float(), dim=1)


encoder_q = Encoder()
encoder_k = copy.deepcopy(encoder_q)
for p in encoder_k.parameters():
    p.requires_grad = False
queue = F.normalize(torch.randn(DIM, K), dim=0)
ptr = 0
optimizer = torch.optim.SGD(
    encoder_q.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4
)
scaler = torch.amp.GradScaler("cpu")
species = torch.randn(40, 20)
for it in range(120):
    base = species[torch.randint(0, 40, (16,))]
    view_q = base + 0.3 * torch.randn_like(base)
    view_k = base + 0.3 * torch.randn_like(base)
    with torch.autocast("cpu", dtype=torch.float16):
        q = encoder_q(view_q)
        with torch.no_grad():
            for pk, pq in zip(encoder_k.parameters(), encoder_q.parameters()):
                pk.mul_(0.98).add_(pq, alpha=0.02)
            k = encoder_k(view_k)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ queue.clone()
        logits = torch.cat([pos, neg], 1) / 0.1
        loss = F.cross_entropy(logits, torch.zeros(16, dtype=torch.long))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    queue[:, ptr : ptr + 16] = k.t()
    ptr = (ptr + 16) % K
    if it % 20 == 0:
        acc = (logits.argmax(1) == 0).float().mean()
        print(it, f"{loss.item():.3f} acc {acc.item():.2f}")
