"""First-order MAML: inner steps on a copy of the weights, outer steps with a scaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(19)


def task():
    amp, phase = torch.rand(1) * 2 + 0.5, torch.rand(1) * 3.14

    def draw(n):
        x = torch.rand(n, 1) * 6 - 3
        return x, amp * torch.sin(x + phase)

    return draw


net = nn.Sequential(
    nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
)
meta_opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
inner_lr, inner_steps, tasks_per_batch = 0.05, 2, 3


def adapt(params, draw):
    """Inner loop in float32, first order."""
    x, y = draw(10)
    for _ in range(inner_steps):
        loss = F.mse_loss(functional_call(net, params, x), y)
        grads = torch.autograd.grad(loss, list(params.values()))
        params = {
            name: p - inner_lr * g.detach()
            for (name, p), g in zip(params.items(), grads)
        }
    return params


for it in range(70):
    meta_opt.zero_grad()
    outer = 0.0
    for _ in range(tasks_per_batch):
        draw = task()
        fast = adapt(dict(net.named_parameters()), draw)
        x, y = draw(10)
        with torch.autocast("cpu", dtype=torch.float16):
            query = functional_call(net, fast, x)
            loss = F.mse_loss(query.float(), y) / tasks_per_batch
        scaler.scale(loss).backward()
        outer += loss.item()
    scaler.unscale_(meta_opt)
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    scaler.step(meta_opt)
    scaler.update()
    if it % 10 == 0:
        print(it, f"query loss {outer:.4f}")
