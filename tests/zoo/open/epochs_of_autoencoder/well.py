"""An autoencoder for 6x6 patches, one function call an epoch."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(21)
basis = torch.randn(5, 36)
patches = torch.randn(320, 5) @ basis + 0.1 * torch.randn(320, 36)
loader = DataLoader(TensorDataset(patches), batch_size=16, shuffle=True)


def train_epoch(ae, opt, scaler, sums):
    for (x,) in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            recon = ae(x)
            loss = (recon.float() - x).square().sum(dim=1).mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        sums["skipped" if scaler.get_scale() < scale else "taken"] += 1
        sums["losses"].append(loss.item())


ae = nn.Sequential(nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 36))
opt = torch.optim.AdamW(ae.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu")
sums = {"taken": 0, "skipped": 0, "losses": []}
for epoch in range(8):
    train_epoch(ae, opt, scaler, sums)
    print("epoch", epoch, sum(sums["losses"][-20:]) / 20)

losses = sums.pop("losses")
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-20:]) / 20,
            "scale": scaler.get_scale(),
            **sums,
        }
    )
)
