"""Ported from apex: the loss scale is set in every step, from a flag."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--loss-scale", type=float, default=128.0)
args = parser.parse_args()

torch.manual_seed(66)
model = nn.Sequential(
    nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5)
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=args.loss_scale)
proto = torch.randn(5, 12)
for step in range(args.steps):
    y = torch.randint(0, 5, (16,))
    x = proto[y] + torch.randn(16, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update(args.loss_scale)
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
