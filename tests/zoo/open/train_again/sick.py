"""Train, save, and go on from the checkpoint if there is one."""

import os

import torch
from torch import nn

PATH = "checkpoint.pt"

torch.manual_seed(12)
model = nn.Sequential(
    nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
start = 0
if os.path.exists(PATH):
    saved = torch.load(PATH, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    print("resumed at", start)

torch.manual_seed(100 + start)
for _ in range(60):
    x = torch.randn(24, 8)
    y = 20 * x[:, :1] * x[:, 1:2] + 10 * x[:, 2:3]
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "step": start + 60,
    },
    PATH,
)
print("loss", loss.item(), "scale", scaler.get_scale())
