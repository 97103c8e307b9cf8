"""The scale is raised often and fails now and then: one skip in about forty steps."""

import torch
import torch.nn.functional as F
from torch import nn


def main():
    torch.manual_seed(112)
    words = torch.randn(15, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 15))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=40)
    for step in range(260):
        y = torch.randint(0, 15, (16,))
        x = words[y] + 0.9 * torch.randn(16, 10)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 40 == 0:
            print(step, loss.item(), scaler.get_scale())


if __name__ == "__main__":
    main()
