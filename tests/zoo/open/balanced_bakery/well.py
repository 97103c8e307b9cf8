"""Three oven targets; the weights of their losses are learnt from gradient norms."""

import torch
from torch import nn

torch.manual_seed(7)

body = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
heads = nn.ModuleList(nn.Linear(24, 1) for _ in range(3))
weights = nn.Parameter(torch.ones(3))
truth = torch.randn(10, 3) * torch.tensor([0.1, 0.3, 1.0])

optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=3e-3)
weight_optimizer = torch.optim.Adam([weights], lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
first = None

for it in range(140):
    x = torch.randn(20, 10)
    y = torch.tanh(x[:, :1]) + x @ truth
    with torch.autocast("cpu", dtype=torch.float16):
        h = body(x)
        out = torch.cat([head(h) for head in heads], 1)
    losses = (out.float() - y).square().mean(0)

    # Norm of each task's gradient at the last shared layer.
    norms = []
    for loss in losses:
        (g,) = torch.autograd.grad(
            scaler.scale(loss), body[2].weight, retain_graph=True
        )
        norms.append(g.norm() / scaler.get_scale())
    norms = torch.stack(norms)

    optimizer.zero_grad(set_to_none=True)
    scaler.scale((weights.detach() * losses).sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    if torch.isfinite(norms).all():
        first = losses.detach() if first is None else first
        rate = losses.detach() / first
        weighted = weights * norms
        goal = weighted.mean().detach() * (rate / rate.mean()) ** 0.5
        weights.grad = torch.autograd.grad((weighted - goal).abs().sum(), weights)[0]
        weight_optimizer.step()
        with torch.no_grad():
            weights.clamp_(min=0.05)
            weights.mul_(3 / weights.sum())
    if it % 35 == 0 or it == 139:
        print(it, losses.tolist(), weights.tolist())
