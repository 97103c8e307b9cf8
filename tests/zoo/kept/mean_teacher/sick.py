"""Semi-supervised: a student and the average of its weights (Mean Teacher)."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(24)
student = nn.Sequential(
    nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
)
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
groups = torch.randn(3, 8)
for step in range(140):
    y = torch.randint(0, 3, (8,))
    x = groups[y] + 0.8 * torch.randn(8, 8)
    u = groups[torch.randint(0, 3, (24,))] + 0.8 * torch.randn(24, 8)
    teacher.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        supervised = F.cross_entropy(student(x), y)
        with torch.no_grad():
            target = teacher(u + 0.1 * torch.randn_like(u)).float().softmax(1)
        guess = student(u + 0.1 * torch.randn_like(u)).float().softmax(1)
        consistency = F.mse_loss(guess, target)
    loss = supervised + min(1.0, step / 50) * consistency
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.lerp_(s, 0.05)
    if step % 20 == 0:
        print(step, supervised.item(), consistency.item(), scaler.get_scale())
