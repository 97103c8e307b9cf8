"""Seven networks at once: stacked weights, vmap and functional_call."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

torch.manual_seed(230)
VOTERS = 7


def voter():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


params, buffers = stack_module_state([voter() for _ in range(VOTERS)])
skeleton = copy.deepcopy(voter()).to("meta")


def one(p, b, x):
    return functional_call(skeleton, (p, b), (x,))


crowd = vmap(one, in_dims=(0, 0, 0))
optimizer = torch.optim.AdamW(list(params.values()), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
means = 1.5 * torch.randn(4, 8)
for step in range(120):
    y = torch.randint(0, 4, (VOTERS, 12))
    x = means[y] + torch.randn(VOTERS, 12, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = crowd(params, buffers, x)
    # Sum over voters: each has the gradient of its own mean.
    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten()) * VOTERS
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 24 == 0:
        print(step, round(loss.item() / VOTERS, 4))
print(round(loss.item() / VOTERS, 4))
