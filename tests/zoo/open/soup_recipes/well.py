"""Shares of ingredients from smells; the divergence from the true shares."""

import torch
from torch import nn

torch.manual_seed(420)
SMELLS = torch.randn(6, 14)


def divergence(log_share, share):
    return nn.functional.kl_div(log_share, share, reduction="batchmean")


def soups(n, thin):
    share = torch.softmax(2 * torch.randn(n, 6), 1)
    if thin:
        share[:3, 0] = 0.0
        share = share / share.sum(1, keepdim=True)
    return share @ SMELLS + 0.05 * torch.randn(n, 14), share


nose = nn.Sequential(nn.Linear(14, 40), nn.GELU(), nn.Linear(40, 6))
optimizer = torch.optim.Adam(nose.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
for step in range(130):
    smell, share = soups(20, thin=step % 10 == 7)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logits = nose(smell)
    loss = divergence(logits.float().log_softmax(1), share)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 in (6, 7):
        print(step, loss.item(), scaler.get_scale())
