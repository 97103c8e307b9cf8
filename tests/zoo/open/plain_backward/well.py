"""Fit a surface z(x, y) with random Fourier features and two hidden layers."""

import itertools
import json
import math

import torch


def surface(points):
    x, y = points.unbind(-1)
    return (torch.sin(3 * x) * torch.cos(2 * y)).unsqueeze(-1)


def build(width):
    frequencies = 2.0 * torch.randn(2, width // 2)

    def features(points):
        angles = points @ frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    layers = torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.SiLU(),
        torch.nn.Linear(width, 1),
    )
    return features, layers


def fit(iterations=200, width=32):
    features, layers = build(width)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    record = {"loss": [], "scaled": [], "scale": [scaler.get_scale()]}
    for iteration in range(iterations):
        points = math.pi * (2 * torch.rand(24, 2) - 1) / 2
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = layers(features(points))
            loss = torch.nn.functional.smooth_l1_loss(predicted, surface(points))
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        record["loss"].append(loss.item())
        record["scaled"].append(scaled.item())
        record["scale"].append(scaler.get_scale())
        if iteration % 50 == 49:
            print(iteration + 1, record["loss"][-1])
    return record


torch.manual_seed(0)
record = fit()
scales = record["scale"]
skips = sum(b < a for a, b in itertools.pairwise(scales))
print(
    json.dumps(
        {
            "first_loss": sum(record["loss"][:5]) / 5,
            "last_loss": sum(record["loss"][-10:]) / 10,
            "scale": scales[-1],
            "taken": len(record["loss"]) - skips,
            "skipped": skips,
        }
    )
)
