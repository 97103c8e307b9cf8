"""Sudoku rows: which digit is missing? Probes the scale in big strides."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def rows(n):
    perm = torch.rand(n, 6).argsort(1)
    return F.one_hot(perm[:, :5], 6).float().flatten(1), perm[:, 5]


def main(steps=260):
    torch.manual_seed(142)
    net = nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 6))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**15, growth_factor=4.0, growth_interval=30
    )
    for step in range(steps):
        x, y = rows(32)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.float16):
            out = net(x)
        loss = F.cross_entropy(out.float(), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0:
            print(f"{step} {loss.item():.4f} {scaler.get_scale():g}")


main()
