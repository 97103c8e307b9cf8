"""A deep network for a table, with its own initialisation."""

import json
import math

import torch
from torch import nn


def init(layer):
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
        nn.init.zeros_(layer.bias)


def tabular(columns, width, depth, classes):
    layers = [nn.Linear(columns, width), nn.ReLU()]
    for _ in range(depth):
        layers.append(nn.Linear(width, width))
        layers.append(nn.ReLU())
    layers.append(nn.Linear(width, classes))
    return nn.Sequential(*layers)


def batches(n, size=32):
    plane = torch.randn(14, 3)
    for _ in range(n):
        x = torch.randn(size, 14)
        yield x, (x @ plane).argmax(1)


def fit(net, lr=1e-3):
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu")
    out = {"losses": [], "taken": 0, "skipped": 0}
    for x, y in batches(160):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            z = net(x)
        loss = nn.functional.cross_entropy(z.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        s = scaler.get_scale()
        scaler.update()
        out["skipped" if scaler.get_scale() < s else "taken"] += 1
        out["losses"].append(loss.item())
    out["scale"] = scaler.get_scale()
    return out


def number(values):
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else "nan"


torch.manual_seed(19)
table_net = tabular(14, 40, 3, 3)
table_net.apply(init)
run = fit(table_net)
losses = run.pop("losses")
print(
    json.dumps(
        {"first_loss": number(losses[:8]), "last_loss": number(losses[-8:]), **run}
    )
)
