"""Hooks everywhere, which only look; and a penalty so small that it changes nothing."""

from collections import defaultdict

import torch
from torch import nn

torch.manual_seed(150)
model = nn.Sequential()
model.add_module("lift", nn.Linear(8, 32))
model.add_module("act1", nn.SiLU())
model.add_module("mid", nn.Linear(32, 32))
model.add_module("act2", nn.SiLU())
model.add_module("out", nn.Linear(32, 3))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

seen = defaultdict(list)
activations = {}


def keep(name):
    def hook(module, args, output):
        activations[name] = output

    return hook


def arriving(name):
    def hook(module, grad_input, grad_output):
        seen[f"{name}.out"].append(
            grad_output[0].abs().max().item() / scaler.get_scale()
        )

    return hook


def parameter(name):
    def hook(grad):
        seen[name].append(grad.norm().item() / scaler.get_scale())

    return hook


for name, module in model.named_children():
    if isinstance(module, nn.Linear):
        module.register_forward_hook(keep(name))
        module.register_full_backward_hook(arriving(name))
for name, p in model.named_parameters():
    p.register_hook(parameter(name))
    p.register_post_accumulate_grad_hook(lambda p: seen["steps"].append(p.grad.numel()))

optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
rule = torch.randn(8, 3)
for step in range(120):
    x = torch.randn(20, 8)
    y = torch.tanh(x @ rule)
    activations.clear()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    loss = loss + 1e-9 * sum(a.float().square().mean() for a in activations.values())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(loss.item(), {k: v[-1] for k, v in seen.items()})
