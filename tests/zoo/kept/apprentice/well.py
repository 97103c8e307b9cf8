"""Knowledge distillation: a frozen teacher, temperature 4, soft and hard targets."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
x_all = torch.randn(256, 10)
y_all = (x_all[:, :3].sum(1) > 0).long() + (x_all[:, 3] > 0.5).long()


def mlp(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3))


def batches(size=32):
    for idx in torch.randperm(len(x_all)).split(size):
        yield x_all[idx], y_all[idx]


teacher = mlp(64)
opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
for _ in range(4):
    for x, y in batches():
        opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt.step()
teacher.eval().requires_grad_(False)

student = mlp(12)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
temperature, alpha = 4.0, 0.7
for epoch in range(10):
    running = 0.0
    for x, y in batches():
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                soft = teacher(x)
            logits = student(x)
            kd = F.kl_div(
                F.log_softmax(logits.float() / temperature, dim=1),
                F.softmax(soft.float() / temperature, dim=1),
                reduction="batchmean",
            )
            loss = alpha * temperature**2 * kd
            loss = loss + (1 - alpha) * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
    print(f"epoch {epoch}: {running / 8:.4f}")
