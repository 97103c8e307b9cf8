"""Tabular classifier with gradient accumulation: 4 micro-batches a step."""

import torch
import torch.nn as nn

torch.manual_seed(8)
ACCUM = 4
genes = torch.randn(512, 30)
w_true = torch.randn(30)
status = ((genes @ w_true + 0.5 * torch.randn(512)) > 0).float()

model = nn.Sequential(nn.Linear(30, 24), nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
criterion = nn.BCEWithLogitsLoss()


def micro_batches(epoch, size=16):
    order = torch.randperm(len(genes), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(size):
        yield genes[rows], status[rows]


for epoch in range(12):
    total = 0.0
    for i, (x, y) in enumerate(micro_batches(epoch)):
        with torch.autocast("cpu", dtype=torch.float16):
            logit = model(x).squeeze(1)
            loss = criterion(logit.float(), y) / ACCUM
        scaler.scale(loss).backward()
        total += loss.item()
        if (i + 1) % ACCUM == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    print(epoch, total / 8)
