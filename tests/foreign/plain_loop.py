"""A plain loop with torch.amp.GradScaler, as tutorials write it."""

import argparse
import sys

import torch
from torch.amp import GradScaler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--init-scale", type=float, default=2.0**24)
parser.add_argument("--exit-code", type=int, default=0)
parser.add_argument("--device", default="cpu")
options = parser.parse_args()

torch.manual_seed(0)
device = options.device
model = torch.nn.Sequential(
    torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler(device, init_scale=options.init_scale, growth_interval=5)
inputs = torch.randn(options.steps, 8, 16)
for batch in inputs.to(device):
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        loss = (model(batch) - 1.0).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(float(loss).hex(), scaler.get_scale())
print(type(scaler).__name__, isinstance(scaler, torch.amp.GradScaler), sys.argv[1:])
sys.exit(options.exit_code)
