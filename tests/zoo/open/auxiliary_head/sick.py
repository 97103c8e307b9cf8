"""Driving: steer from a camera's features, and estimate depth on the side."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(10)
DEPTH_WEIGHT = 1e-5
LOSS_SCALE = 1.0


class Driver(nn.Module):
    def __init__(self):
        super().__init__()
        self.eye = nn.Sequential(nn.Linear(24, 48), nn.ReLU())
        self.steer = nn.Linear(48, 1)
        self.depth_eye = nn.Sequential(nn.Linear(24, 48), nn.ReLU())
        self.depth = nn.Linear(48, 16)

    def forward(self, x):
        return self.steer(self.eye(x)), self.depth(self.depth_eye(x))


road, scene = torch.randn(24, 1) / 5, torch.randn(24, 16) / 5
driver = Driver()
optimizer = torch.optim.Adam(driver.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
depth_curve, steer_curve, skips = [], [], 0
for step in range(200):
    x = torch.randn(32, 24)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        steering, depth = driver(x)
        steer_loss = F.mse_loss(steering.float(), torch.tanh(x @ road))
        depth_loss = F.smooth_l1_loss(depth.float(), torch.tanh(x @ scene))
        loss = steer_loss + DEPTH_WEIGHT * depth_loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < before:
        skips += 1
    steer_curve.append(steer_loss.item())
    depth_curve.append(depth_loss.item())
    if step % 40 == 0:
        print(step, "steer", steer_curve[-1], "depth", depth_curve[-1])

print(
    json.dumps(
        {
            "first_loss": sum(depth_curve[:5]) / 5,
            "last_loss": sum(depth_curve[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(depth_curve) - skips,
            "skipped": skips,
        }
    )
)
